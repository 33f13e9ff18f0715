"""What others must know of a loaded engine to make requests for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_engine.core.laps import Lap
from stoker_engine.sizing.cache_groups import CacheGroup, blocks_per_sequence, usable_blocks


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a loaded engine; they never change.

    Attributes:
        max_model_len: longest sequence, prompt and output.
        num_blocks, block_size: of the KV cache, the null block included.
        cache_groups: groups of layers that share block tables.
        step_tokens: most tokens that one step computes.
        eos_token_ids: tokens that end a sequence.
        sampling_defaults: parameters that the model's makers recommend (generation_config.json), by the names of
            `SamplingParams`; for requests that leave them out.
        licence, model_card: what the model comes with, as it says it.
        dtype: in which it is computed.
        quantization: by which method its weights are quantized, as ``--quantization`` takes it; empty: they are not,
            or are those of a GGUF file.
        weights, kv_cache_dtype: how its weights, and keys and values, are stored; for people.
        load_laps: the parts of loading it; the first ends when its process started.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    cache_groups: tuple[CacheGroup, ...]
    step_tokens: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    sampling_defaults: Mapping[str, Any]
    max_logprobs: int
    seed: int
    licence: str | None = None
    model_card: str | None = None
    dtype: str = ""
    quantization: str = ""
    weights: str = ""
    kv_cache_dtype: str = ""
    load_laps: tuple[Lap, ...] = field(default=(), compare=False)

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return usable_blocks(self.num_blocks)

    @property
    def max_concurrency(self) -> float:
        """How many sequences of the greatest length the KV cache holds at once."""
        longest = blocks_per_sequence(self.cache_groups, self.max_model_len, self.step_tokens, self.block_size)
        return self.usable_blocks / longest

    @property
    def kv_tokens(self) -> int:
        """Tokens of these sequences."""
        return int(self.max_concurrency * self.max_model_len)
