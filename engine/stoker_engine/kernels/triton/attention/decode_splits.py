"""Splits the keys of a step's decodes into parts for different programs.

A part is a fixed number of keys of one sequence; the parts of all sequences are numbered consecutively:

    seq_lens    300   70   600             starts      0  2  3  6
    parts       0 0   1    2 2 2 · ·       sequences   0  0  1  2  2  2  -1 -1

The device lists the parts: a CUDA graph, whose number of programs is fixed, needs only an upper bound of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

#: Number of keys in a part; the last of a sequence may have fewer.
PART_KEYS: Final = 256
_LENGTHS: Final = tl.constexpr(128)
_FILLED: Final = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_sequences", "most_parts", "seq_lens"])
def _decode_splits(  # type: ignore[no-untyped-def]
    seq_lens, starts, sequences, num_sequences, most_parts, PART_KEYS: tl.constexpr
):
    """List the parts of one sequence; the last program stores the total, and marks unused entries."""
    sequence = tl.program_id(0)
    first = tl.full([], 0, tl.int32)
    for begin in tl.range(0, sequence, _LENGTHS):
        at = begin + tl.arange(0, _LENGTHS)
        lengths = tl.load(seq_lens + at, mask=at < sequence, other=0)
        first += tl.sum((lengths + PART_KEYS - 1) // PART_KEYS, 0)
    tl.store(starts + sequence, first)
    is_sequence = sequence < num_sequences
    length = tl.load(seq_lens + sequence, mask=is_sequence, other=0)
    end = tl.where(is_sequence, first + (length + PART_KEYS - 1) // PART_KEYS, most_parts)
    name = tl.where(is_sequence, sequence, -1)
    for begin in tl.range(first, end, _FILLED):
        at = begin + tl.arange(0, _FILLED)
        tl.store(sequences + at, tl.zeros_like(at) + name, mask=at < end)


@operation("stoker::decode_splits")
def decode_splits(seq_lens: torch.Tensor, most_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List the parts of decodes.

    Args:
        seq_lens: [sequences] int32.
        most_parts: upper bound of the number of parts.

    Returns:
        [sequences + 1] int32: each sequence's first part, and the number of parts; and [most_parts] int32: the sequence
        of each part, -1 after the last one.
    """
    starts = torch.empty(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    sequences = torch.empty(most_parts, dtype=torch.int32, device=seq_lens.device)
    _decode_splits[(len(seq_lens) + 1,)](seq_lens, starts, sequences, len(seq_lens), most_parts, PART_KEYS=PART_KEYS)
    return starts, sequences


@decode_splits.register_fake
def _(seq_lens: torch.Tensor, most_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.empty(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    return starts, torch.empty(most_parts, dtype=torch.int32, device=seq_lens.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.kernel_variants`."""
    pointers = dict.fromkeys(("seq_lens", "starts", "sequences"), "i32")
    numbers = {"num_sequences": "i32", "most_parts": "i32"}
    yield KernelVariant.of("decode_splits", _decode_splits, pointers, numbers, {"PART_KEYS": PART_KEYS})
