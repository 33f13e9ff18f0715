"""A model without scheduler and engine: only steps over a paged cache.

Sequences are cut into chunks of random sizes and computed together, decodes beside chunks, in shuffled blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.attention.backend import AttentionBackend, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.attention.select import attention_backend
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import settle
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder
from stoker_engine.models.loading.weights import load_weights
from stoker_engine.models.model import Model, StepInputs

from ...support.engine.served import served

_BLOCK = 8


@dataclass(eq=False)
class Sequence:
    """One sequence's tokens, and the logits of all positions computed so far."""

    tokens: list[int]
    blocks: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass
class PagedRun:
    """Runs `model` greedily on several prompts at once; then `sequences` contain tokens and logits.

    Attributes:
        rows: the batch's rows, for operations that depend on them: sequence i has row i.
        compares_subsets: whether the first step is repeated for subsets of rows, with equal results.
    """

    model: Model
    prompts: list[list[int]]
    new_tokens: int
    seed: int = 0
    dtype: torch.dtype = torch.float32
    chunks: tuple[int, ...] = (1, 5, 17)
    rows: BatchRows = field(default_factory=BatchRows)
    compares_subsets: bool = True

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        longest = max(map(len, self.prompts)) + self.new_tokens
        each = -(-longest // _BLOCK)
        blocks = list(range(1, 1 + each * len(self.prompts)))  # 0 is the null block
        rng.shuffle(blocks)
        self.sequences = [
            Sequence(list(prompt), blocks[index * each : (index + 1) * each])
            for index, prompt in enumerate(self.prompts)
        ]
        specs = [layer.cache for layer in self.model.config.layers]
        self.windows = list(dict.fromkeys(spec.sliding_window for spec in specs))
        groups = [self.windows.index(spec.sliding_window) for spec in specs]
        self.caches = [
            _cache(spec, group, len(blocks) + 1, self.dtype) for spec, group in zip(specs, groups, strict=True)
        ]
        ends = [len(prompt) + self.new_tokens for prompt in self.prompts]
        with torch.inference_mode():
            while any(len(s.tokens) < end for s, end in zip(self.sequences, ends, strict=True)):
                todo = [s for s, end in zip(self.sequences, ends, strict=True) if len(s.tokens) < end]
                self._step([(s, min(rng.choice(self.chunks), len(s.tokens) - len(s.logits))) for s in todo])

    def _step(self, parts: list[tuple[Sequence, int]]) -> None:
        parts = sorted(parts, key=lambda part: part[1] > 1)  # decodes first
        tokens, positions, slots, starts = list[int](), list[int](), list[int](), [0]
        batch_rows = list[int]()
        for sequence, count in parts:
            first = len(sequence.logits)
            span = range(first, first + count)
            tokens += sequence.tokens[first : first + count]
            positions += span
            batch_rows += [self.sequences.index(sequence)] * count
            slots += [sequence.blocks[p // _BLOCK] * _BLOCK + p % _BLOCK for p in span]
            starts.append(starts[-1] + count)
        query_starts = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor([len(s.logits) + count for s, count in parts], dtype=torch.int32)
        tables = torch.tensor([s.blocks for s, _ in parts], dtype=torch.int32)
        metadata = AttentionMetadata(
            query_starts=query_starts,
            seq_lens=seq_lens,
            num_decodes=sum(count == 1 for _, count in parts),
            block_size=_BLOCK,
            groups=[BlockTables(tables, torch.tensor(slots), window) for window in self.windows],
            query_starts_host=query_starts.numpy(),
            seq_lens_host=seq_lens.numpy(),
        )
        plan = self.model.backend.prepare(metadata)
        inputs = StepInputs(torch.tensor(tokens), torch.tensor(positions), plan, self.caches)
        token_rows = torch.tensor(batch_rows)
        self.rows.begin(token_rows)
        hidden = self.model.forward(inputs)
        if self.compares_subsets and not any(len(s.logits) for s in self.sequences):  # once
            for rows in (tokens[:0], range(len(tokens) - 1, len(tokens)), range(0, len(tokens), 3)):
                kept = torch.tensor(rows, dtype=torch.int64)
                self.rows.begin(token_rows, kept)
                alone = self.model.forward(replace(inputs, rows=kept))
                torch.testing.assert_close(alone, hidden[list(rows)], rtol=1e-3, atol=1e-4)
        self.rows.begin(token_rows)
        self.rows.select(RowSpace.LOGITS, RowSpace.KEPT, torch.arange(len(token_rows)))
        logits = self.model.logits(hidden).float()
        for (sequence, _), first, last in zip(parts, starts[:-1], starts[1:], strict=True):
            sequence.logits += logits[first:last]
            if len(sequence.logits) == len(sequence.tokens):
                sequence.tokens.append(int(sequence.logits[-1].argmax()))


def _cache(spec: CacheSpec, group: int, blocks: int, dtype: torch.dtype) -> KVCache:
    # Unwritten cache entries must not matter.
    key = torch.full((blocks, _BLOCK, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=dtype)
    if spec.latent:
        return KVCache(key, key[..., : spec.value_head_dim], group)
    return KVCache(key, torch.full((*key.shape[:-1], spec.value_head_dim), torch.nan, dtype=dtype), group)


def load_decoder(
    folder: Path,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float32,
    backend: AttentionBackend | None = None,
    kernels: Kernels | None = None,
) -> Decoder:
    """Load the native model of a Hugging Face folder, by default with the engine's choice of backend and kernels."""
    config = ModelConfig.from_dict(read_config(folder))
    cpu = torch.device("cpu")
    build = Build(dtype, backend or attention_backend(cpu, served(dtype)), kernels or select_kernels(cpu, dtype))
    with torch.inference_mode():
        model = Decoder(config, build, max_model_len)
        load_weights(model, SafetensorsFolder(folder), FAMILIES[config.architecture].weight_names)
        settle(model)
    return model


Reference = Callable[[list[int]], torch.Tensor]


def assert_run_is(run: PagedRun, reference: Reference) -> None:
    """Assert that each position's logits are the reference's, and each new token its greedy choice.

    `reference` gives [tokens, vocabulary] for a whole sequence. A token may differ if its two best are within 1e-3.
    """
    for prompt, sequence in zip(run.prompts, run.sequences, strict=True):
        computed = sequence.tokens[:-1]
        expected = reference(computed)
        logits = torch.stack(sequence.logits)
        scale = expected.abs().max()
        assert (logits - expected).abs().max() <= 1e-4 * scale
        for position in range(len(prompt) - 1, len(computed)):
            best = expected[position].max()
            assert best - expected[position, sequence.tokens[position + 1]] <= 1e-3


@pytest.fixture(scope="session")
def paged_run() -> type[PagedRun]:
    """See `PagedRun`."""
    return PagedRun


@pytest.fixture(scope="session")
def decoder_of() -> Callable[..., Decoder]:
    """See `load_decoder`."""
    return load_decoder


@pytest.fixture(scope="session")
def assert_run() -> Callable[[PagedRun, Reference], None]:
    """See `assert_run_is`."""
    return assert_run_is
