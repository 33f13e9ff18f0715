"""Matrices in GGUF's format Q8_0, drawn: scales of either sign and many sizes, and every integer."""

from __future__ import annotations

import torch


def random_blocks(rows: int, blocks: int, seed: int) -> torch.Tensor:
    """uint8 [rows, blocks × 34], in memory of its own size."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(rows, blocks, 1, generator=generator) / 64
    scales *= 2.0 ** torch.randint(-8, 3, scales.shape, generator=generator)
    integers = torch.randint(-128, 128, (rows, blocks, 32), generator=generator, dtype=torch.int8)
    parts = (scales.to(torch.float16).view(torch.uint8), integers.view(torch.uint8))
    return torch.cat(parts, dim=-1).view(rows, blocks * 34)
