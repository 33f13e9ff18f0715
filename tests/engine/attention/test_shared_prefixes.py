"""Decodes with a common prefix read it together on CPUs, and have the same bits as alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stoker_engine.attention.backend import AttentionShape
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.kernels.cpu.library import library

from .conftest import Sequences, run

pytestmark = pytest.mark.skipif(library() is None, reason="there are no CPU kernels")

PLAIN = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, value_head_dim=32, scale=0.2)
SHAPES = {
    "plain": PLAIN,
    "one head each": dataclasses.replace(PLAIN, num_kv_heads=6),
    "window 700": dataclasses.replace(PLAIN, sliding_window=700),
    "window 150": dataclasses.replace(PLAIN, sliding_window=150),
    "window wider than all sequences": dataclasses.replace(PLAIN, sliding_window=5000),
    "alibi": dataclasses.replace(PLAIN, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05, 0.02, 0.01])),
    "soft cap and sinks": dataclasses.replace(PLAIN, logits_soft_cap=5.0, sinks=torch.linspace(-2, 4, 6)),
}

#: (length, sequence that it shares a prefix with, length of the prefix): two alternating families, a later branch,
#: prefixes that end within a split (the first ones are smaller), at its end and after it, lengths around it, and one
#: without shared prefix.
FAMILIES = [
    (1101, 0, 0), (1290, 1, 0), (1060, 0, 1056), (1538, 1, 1024), (1025, 0, 1008), (1200, 1, 528), (513, 0, 512),
    (512, 0, 480), (1537, 0, 1056), (700, 9, 0), (1026, 1, 1008), (2, 10, 0), (128, 0, 112), (129, 1, 128),
    (300, 0, 272), (257, 1, 256), (385, 0, 384),
]  # fmt: skip


def _related(shape: AttentionShape, dtype: torch.dtype, block_size: int, kv_cache_dtype: str = "auto") -> Sequences:
    lengths = [length for length, _, _ in FAMILIES]
    drawn = Sequences.random(shape, lengths, dtype, seed=3, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    for s, (_, of, common) in enumerate(FAMILIES):
        blocks = common // block_size
        drawn.blocks[s][:blocks] = drawn.blocks[of][:blocks]
        for each in (drawn.keys, drawn.values):
            each[s][: blocks * block_size] = each[of][: blocks * block_size]
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("name", SHAPES)
def test_decodes_with_shared_prefixes_have_the_same_bits_as_alone(
    name: str, block_size: int, dtype: torch.dtype
) -> None:
    found = library()
    assert found is not None
    backend = CpuBackend(found)
    sequences = _related(SHAPES[name], dtype, block_size)
    last = [(s, length - 1, length) for s, (length, _, _) in enumerate(FAMILIES)]
    together = run(backend, sequences, [(s, 0, end) for s, end, _ in last if end], last)
    in_reverse = run(backend, sequences, list(reversed(last)))
    for s, rows in enumerate(run(backend, sequences, *([span] for span in last))):
        assert torch.equal(together[s][-1:], rows), s
        assert torch.equal(in_reverse[s], rows), s
        if name == "plain" and s in (2, 3):
            torch.testing.assert_close(rows[0].double(), sequences.expected(s)[-1], rtol=1e-2, atol=1e-2)


def test_more_decodes_than_a_tile_has_rows_have_the_same_bits_as_alone() -> None:
    """With 8-bit keys and per-token scales."""
    found = library()
    assert found is not None
    backend, count = CpuBackend(found), 70
    sequences = Sequences.random(PLAIN, [516] * count, torch.bfloat16, kv_cache_dtype="fp8_per_token_head")
    for s in range(1, count):
        sequences.blocks[s][:32] = sequences.blocks[0][:32]
        for each in (sequences.keys, sequences.values):
            each[s][:512] = each[0][:512]
    run(backend, sequences, *([(s, 0, 515)] for s in range(count)))
    together = run(backend, sequences, [(s, 515, 516) for s in range(count)])
    for s in range(count):
        [alone] = [rows for rows in run(backend, sequences, [(s, 515, 516)]) if len(rows)]
        assert torch.equal(together[s], alone)
