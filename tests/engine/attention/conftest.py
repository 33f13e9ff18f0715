"""Ragged batches over a shuffled, strided cache, and reference attention in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.attention.backend import AttentionBackend, AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.exec.kv_views import LayerScales, layer_view
from stoker_engine.sizing.cache_groups import NULL_BLOCK
from stoker_engine.sizing.kv_format import kv_format

from ...support.engine.guarded_cache import GuardedBlocks


@dataclass
class Sequences:
    """Sequences with their queries, keys and values, and a cache for them.

    Attributes:
        queries, keys, values: one tensor per sequence, [length, heads, d].
        blocks: block numbers of each sequence.
        kv_cache_dtype: value of `--kv-cache-dtype`.
        layer_scales: the layer's scales of keys and values, if tokens have none.
    """

    shape: AttentionShape
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    blocks: list[list[int]]
    latent: bool
    cache: KVCache
    block_size: int
    kv_cache_dtype: str = "auto"
    layer_scales: LayerScales | None = None

    @classmethod
    def random(
        cls,
        shape: AttentionShape,
        lengths: list[int],
        dtype: torch.dtype,
        latent: bool = False,
        seed: int = 0,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        layer_scales: LayerScales | None = None,
        heads_first: bool | None = None,
    ) -> Sequences:
        """Create sequences of the given lengths; for latent attention the values are the first elements of the keys.

        Blocks have heads first, as on CPUs, or tokens first, as on GPUs; None draws one of both.
        """
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int, size: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, size, generator=generator).to(dtype) for n in lengths]

        queries, keys = rows(shape.num_heads, shape.head_dim), rows(shape.num_kv_heads, shape.head_dim)
        values = (
            [k[..., : shape.value_head_dim] for k in keys] if latent else rows(shape.num_kv_heads, shape.value_head_dim)
        )
        counts = [-(-n // block_size) for n in lengths]
        numbers = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # 0 is the null block
        blocks = [[numbers.pop() for _ in range(count)] for count in counts]
        # Two layers share each block, as in the engine: a layer's blocks are not contiguous.
        kv = kv_format(kv_cache_dtype, str(dtype))
        spec = CacheSpec(shape.num_kv_heads, shape.head_dim, shape.value_head_dim, latent=latent)
        part = _pool(sum(counts) + 1, 2, block_size * kv.token_bytes(spec))
        if heads_first is None:
            heads_first = random.Random(f"{lengths} {seed}").random() < 0.5
        cache = layer_view(part, spec, block_size, 0, kv, layer_scales, heads_first)
        return cls(shape, queries, keys, values, blocks, latent, cache, block_size, kv_cache_dtype, layer_scales)

    def step(
        self, spans: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, AttentionMetadata]:
        """Return the flat batch of one step that computes the tokens start … end - 1 of some sequences.

        Args:
            spans: (sequence, start, end), those of one token first.
        """
        window, size = self.shape.sliding_window, self.block_size
        width = max(-(-end // size) for _, _, end in spans)
        tables = torch.zeros(len(spans), width, dtype=torch.int32)
        slots = []
        for row, (s, start, end) in enumerate(spans):
            for index in range(-(-end // size)):
                # Blocks outside of the window are released.
                seen = window is None or (index + 1) * size > start + 1 - window
                tables[row, index] = self.blocks[s][index] if seen else NULL_BLOCK
            slots += [self.blocks[s][at // size] * size + at % size for at in range(start, end)]
        starts = torch.tensor([0, *(end - start for _, start, end in spans)]).cumsum(0).int()
        ends = torch.tensor([end for _, _, end in spans], dtype=torch.int32)
        metadata = AttentionMetadata(
            query_starts=starts,
            seq_lens=ends,
            num_decodes=sum(end - start == 1 for _, start, end in spans),
            block_size=size,
            groups=[BlockTables(tables, torch.tensor(slots), window)],
            query_starts_host=starts.numpy(),
            seq_lens_host=ends.numpy(),
        )

        def flat(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([parts[s][start:end] for s, start, end in spans])

        return flat(self.queries), flat(self.keys), None if self.latent else flat(self.values), metadata

    def expected(self, sequence: int) -> torch.Tensor:
        """Return attention of the whole sequence by stored keys and values: float64 [length, heads × value dim]."""
        shape, length = self.shape, len(self.queries[sequence])
        group = shape.num_heads // shape.num_kv_heads
        query = self.queries[sequence].double()
        own_key, own_value = self.layer_scales or (None, None)
        key = kept(self.keys[sequence], self.kv_cache_dtype, own_key)
        value = key[..., : shape.value_head_dim]
        if not self.latent:
            value = kept(self.values[sequence], self.kv_cache_dtype, own_value)
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * shape.scale
        if shape.logits_soft_cap is not None:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        if shape.alibi_slopes is not None:
            scores = scores + shape.alibi_slopes.double()[:, None, None] * distance
        hidden = distance > 0
        if shape.sliding_window is not None:
            hidden = hidden | (distance <= -shape.sliding_window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if shape.sinks is not None:
            sinks = shape.sinks.double()[:, None, None].expand(-1, length, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def run(backend: AttentionBackend, sequences: Sequences, *steps: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Run steps of (sequence, start, end); return each sequence's concatenated rows."""
    rows: list[list[torch.Tensor]] = [[] for _ in sequences.queries]
    for spans in steps:
        query, key, value, metadata = sequences.step(spans)
        out = backend.forward(sequences.shape, query, key, value, sequences.cache, backend.prepare(metadata))
        for (sequence, start, end), part in zip(spans, out.split([e - s for _, s, e in spans]), strict=True):
            assert end - start == len(part)
            rows[sequence].append(part)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in rows]


def kept(x: torch.Tensor, kv_cache_dtype: str, layer_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round keys or values [length, heads, d] as such a cache does, by torch's dtypes; return float64."""
    if kv_cache_dtype == "auto":
        return x.double()
    if kv_cache_dtype == "bfloat16":
        return x.bfloat16().double()
    dtype = {"fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8}.get(kv_cache_dtype, torch.float8_e4m3fn)
    largest = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    scale = torch.ones(1, 1, 1) if layer_scale is None else layer_scale.view(1, -1, 1)
    if kv_cache_dtype.endswith("_per_token_head"):
        scale = x.float().abs().amax(-1, keepdim=True) / largest
        scale[scale == 0] = 1
    scaled = (x.float() / scale).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype).double() * scale.double()


def _pool(num_blocks: int, layers: int, layer_bytes: int) -> torch.Tensor:
    """Return the last layer's part of uint8 [blocks, bytes], filled with NaN to show uses of unwritten values; the null
    block is inaccessible.
    """
    blocks = GuardedBlocks(num_blocks, layers * layer_bytes)
    blocks.allow(block for block in range(num_blocks) if block != NULL_BLOCK)
    return blocks.tensor[:, -layer_bytes:]
