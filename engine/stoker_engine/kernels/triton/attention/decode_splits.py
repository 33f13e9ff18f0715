"""Splits the keys of a step's decodes into parts for different programs.

Parts begin at fixed positions, whatever a sequence's length: at first they have 256 keys each, further on they are
longer. So long sequences have fewer parts to join, and sequences with a common prefix have the same parts of it. The
sequences' own keys in the part where their prefix ends are not shared, so parts stay short compared with the prefix.
The parts of all sequences are numbered consecutively:

    begins      0  256  512 … 16128  16384    16896 … 65024  65536        66560 …
    seq_lens    300   70   600             starts      0  2  3  6
    parts       0 0   1    2 2 2 · ·       sequences   0  0  1  2  2  2  -1 -1

The device lists the parts: a CUDA graph, whose number of programs is fixed, needs only an upper bound of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.sizing.part_sizes import PART_SIZES as PART_SIZES
from stoker_engine.sizing.part_sizes import PartSizes as PartSizes

_LENGTHS: Final = tl.constexpr(128)
_FILLED: Final = tl.constexpr(256)


def count_parts(seq_lens: np.ndarray) -> int:
    """Return the number of parts of sequences of the given lengths; padding (length 0) has one, which is empty."""
    sizes, seq_lens = PART_SIZES, np.maximum(seq_lens, 1)
    short = -(-np.minimum(seq_lens, sizes.medium_from) // sizes.short)
    medium = -(-np.clip(seq_lens - sizes.medium_from, 0, sizes.long_from - sizes.medium_from) // sizes.medium)
    long = -(-np.maximum(seq_lens - sizes.long_from, 0) // sizes.long)
    return int((short + medium + long).sum())


@triton.jit
def num_parts(lengths, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of parts of each sequence of the given lengths, as `count_parts`."""
    lengths = tl.maximum(lengths, 1)
    MEDIUM_KEYS: tl.constexpr = SIZES.long_from - SIZES.medium_from
    short = (tl.minimum(lengths, SIZES.medium_from) + SIZES.short - 1) // SIZES.short
    medium_keys = tl.minimum(tl.maximum(lengths - SIZES.medium_from, 0), MEDIUM_KEYS)
    long_keys = tl.maximum(lengths - SIZES.long_from, 0)
    medium = (medium_keys + SIZES.medium - 1) // SIZES.medium
    return short + medium + (long_keys + SIZES.long - 1) // SIZES.long


@triton.jit
def part_begin(part, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the position where a part of a sequence begins."""
    SHORT: tl.constexpr = SIZES.medium_from // SIZES.short
    MEDIUM: tl.constexpr = (SIZES.long_from - SIZES.medium_from) // SIZES.medium
    medium = tl.minimum(tl.maximum(part - SHORT, 0), MEDIUM)
    long = tl.maximum(part - SHORT - MEDIUM, 0)
    return tl.minimum(part, SHORT) * SIZES.short + medium * SIZES.medium + long * SIZES.long


@triton.jit(do_not_specialize=["num_sequences", "most_parts", "seq_lens"])
def _decode_splits(  # type: ignore[no-untyped-def]
    seq_lens, starts, sequences, num_sequences, most_parts, SIZES: tl.constexpr
):
    """List the parts of one sequence; the last program stores the total, and marks unused entries."""
    sequence = tl.program_id(0)
    first = tl.full([], 0, tl.int32)
    for begin in tl.range(0, sequence, _LENGTHS):
        at = begin + tl.arange(0, _LENGTHS)
        lengths = tl.load(seq_lens + at, mask=at < sequence, other=0)
        first += tl.sum(tl.where(at < sequence, num_parts(lengths, SIZES), 0), 0)
    tl.store(starts + sequence, first)
    is_sequence = sequence < num_sequences
    length = tl.load(seq_lens + sequence, mask=is_sequence, other=0)
    end = tl.where(is_sequence, first + num_parts(length, SIZES), most_parts)
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
    _decode_splits[(len(seq_lens) + 1,)](seq_lens, starts, sequences, len(seq_lens), most_parts, SIZES=PART_SIZES)
    return starts, sequences


@decode_splits.register_fake
def _(seq_lens: torch.Tensor, most_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.empty(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    return starts, torch.empty(most_parts, dtype=torch.int32, device=seq_lens.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `decode.kernel_variants`."""
    pointers = dict.fromkeys(("seq_lens", "starts", "sequences"), "i32")
    numbers = {"num_sequences": "i32", "most_parts": "i32"}
    yield KernelVariant.of("decode_splits", _decode_splits, pointers, numbers, {"SIZES": PART_SIZES})
