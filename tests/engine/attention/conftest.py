"""Ragged batches over a shuffled, strided cache, and what attention of them must be, written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables

BLOCK_SIZE = 16


@dataclass
class Sequences:
    """Some sequences: all their queries, keys and values, and a cache that will hold them.

    Attributes:
        queries, keys, values: one tensor a sequence, [length, heads, d].
        blocks: block numbers of each.
    """

    shape: AttentionShape
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    blocks: list[list[int]]
    latent: bool
    cache: KVCache

    @classmethod
    def random(
        cls, shape: AttentionShape, lengths: list[int], dtype: torch.dtype, latent: bool = False, seed: int = 0
    ) -> Sequences:
        """Sequences of the given lengths; where latent, the values are the first numbers of the keys."""
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int, size: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, size, generator=generator).to(dtype) for n in lengths]

        queries, keys = rows(shape.num_heads, shape.head_dim), rows(shape.num_kv_heads, shape.head_dim)
        values = (
            [k[..., : shape.value_head_dim] for k in keys] if latent else rows(shape.num_kv_heads, shape.value_head_dim)
        )
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        numbers = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # block 0 belongs to nobody
        blocks = [[numbers.pop() for _ in range(count)] for count in counts]
        # Two layers share each block, as in the engine: a layer's blocks do not follow each other. What nobody has
        # written must never reach a result.
        num_blocks, heads = sum(counts) + 1, shape.num_kv_heads
        key_pool = torch.full((num_blocks, 2, BLOCK_SIZE, heads, shape.head_dim), torch.nan, dtype=dtype)
        value_pool = torch.full((num_blocks, 2, BLOCK_SIZE, heads, shape.value_head_dim), torch.nan, dtype=dtype)
        key = key_pool[:, 1]
        cache = KVCache(key, key[..., : shape.value_head_dim] if latent else value_pool[:, 1], group=0)
        return cls(shape, queries, keys, values, blocks, latent, cache)

    def step(
        self, spans: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, AttentionMetadata]:
        """The flat batch of one step that computes the tokens start … end - 1 of some sequences.

        Args:
            spans: (sequence, start, end), those of one token first.
        """
        window = self.shape.sliding_window
        width = max(-(-end // BLOCK_SIZE) for _, _, end in spans)
        tables = torch.zeros(len(spans), width, dtype=torch.int32)
        slots = []
        for row, (s, start, end) in enumerate(spans):
            for index in range(-(-end // BLOCK_SIZE)):
                # Blocks that the window has left are given back; their place in the table is 0.
                seen = window is None or (index + 1) * BLOCK_SIZE > start + 1 - window
                tables[row, index] = self.blocks[s][index] if seen else 0
            slots += [self.blocks[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)]
        starts = torch.tensor([0, *(end - start for _, start, end in spans)]).cumsum(0)
        metadata = AttentionMetadata(
            query_starts=starts.int(),
            seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            num_decodes=sum(end - start == 1 for _, start, end in spans),
            block_size=BLOCK_SIZE,
            groups=[BlockTables(tables, torch.tensor(slots))],
        )

        def flat(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([parts[s][start:end] for s, start, end in spans])

        return flat(self.queries), flat(self.keys), None if self.latent else flat(self.values), metadata

    def expected(self, sequence: int) -> torch.Tensor:
        """[length, heads × value_head_dim] float64: attention of the whole sequence."""
        shape, length = self.shape, len(self.queries[sequence])
        group = shape.num_heads // shape.num_kv_heads
        query = self.queries[sequence].double()
        key = self.keys[sequence].double().repeat_interleave(group, dim=1)
        value = self.values[sequence].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * shape.scale
        if shape.logits_soft_cap is not None:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        if shape.alibi_slopes is not None:
            scores = scores + shape.alibi_slopes.double()[:, None, None] * distance
        hidden = distance > 0
        if shape.sliding_window is not None:
            hidden = hidden | (distance <= -shape.sliding_window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
