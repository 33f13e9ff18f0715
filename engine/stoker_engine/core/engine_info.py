"""Properties of a loaded engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_engine.core.laps import Lap
from stoker_engine.sizing.cache_groups import CacheGroup, blocks_per_sequence, usable_blocks


@dataclass(frozen=True)
class EngineInfo:
    """Immutable properties of a loaded engine, for its callers.

    Attributes:
        max_model_len: maximum number of tokens of a sequence, prompt and output.
        num_blocks, block_size: number of KV-cache blocks, including the null block, and tokens per block.
        cache_groups: groups of layers that share block tables.
        step_tokens: maximum number of tokens that one step computes.
        eos_token_ids: tokens that end a sequence.
        sampling_defaults: default sampling parameters from the model's generation_config.json, by the names of
            `SamplingParams`; used for parameters that a request omits.
        licence, model_card: text from the model's metadata.
        dtype: compute dtype.
        quantization: quantization method, as a value of ``--quantization``; empty: not quantized, or a GGUF file.
        weights, kv_cache_dtype: storage formats of the weights, and of keys and values; for display.
        load_laps: parts of the engine's start; if the engine has its own process, the first part ends when that process
            started.
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
        """Number of blocks that sequences can hold."""
        return usable_blocks(self.num_blocks)

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of maximum length that fit the KV cache at once."""
        longest = blocks_per_sequence(self.cache_groups, self.max_model_len, self.step_tokens, self.block_size)
        return self.usable_blocks / longest

    @property
    def kv_tokens(self) -> int:
        """Number of tokens of `max_concurrency` sequences of maximum length."""
        return int(self.max_concurrency * self.max_model_len)
