"""Ranks of one machine's CPUs, joined by memory that all of them see.

What meets there, and how, is in ``kernels/cpu/csrc/comm/shm_collectives.h``: a reduction is one call, and takes a wait
or two of about a microsecond where no rank is late. A rank that waits is awake for 50 µs and then sleeps until the
others come. The memory has no name: it goes with the last process that has it.

Sums are added up in the order of ranks and in float32, as those of `parallel.torch_communicator`: both give the same
bits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from stoker_engine.parallel.communicator import RankLostError

#: More ranks share no memory.
MAX_RANKS: Final = 64

#: Of what a rank brings to one wait; larger tensors go in pieces. Two pieces of each rank lie there.
_SLOT_BYTES: Final = 256 * 1024
_HEADER_BYTES: Final = 128

_SUM, _GATHER, _PARTS, _BROADCAST = range(4)
_OPERATIONS: Final = ("all_reduce", "all_gather", "all_reduce", "broadcast")
_TIMEOUT, _MISMATCH = 1, 2

#: What travels, by the number that ranks compare.
_DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}

_INT, _LONG = ctypes.c_int32, ctypes.c_int64


class _Collective(ctypes.Structure):
    """shm_collectives.h's Collective."""

    _fields_ = (("operation", _INT), ("dtype", _INT), ("rows", _LONG), ("row_bytes", _LONG))

    def __str__(self) -> str:
        """ "all_gather of 4 × 128 bytes (torch.bfloat16)"."""
        shape = f"{self.rows} × {self.row_bytes}" if self.rows != 1 else str(self.row_bytes)
        return f"{_OPERATIONS[self.operation]} of {shape} bytes ({_DTYPES[self.dtype]})"


class _Member(ctypes.Structure):
    """shm_collectives.h's Member."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        *((name, _LONG) for name in ("rank", "size", "slot_bytes", "spin_ns", "timeout_ns", "round", "failure")),
        ("late_ranks", ctypes.c_uint64),
        ("mismatched_rank", _LONG),
        ("collective", _Collective),
        ("other_collective", _Collective),
    )


@dataclass(frozen=True)
class SharedMemory:
    """Where ranks of one machine's CPUs meet.

    Attributes:
        fd: file descriptor of their memory, empty at first, and not used again by others.
        library: the CPU's kernels; None: they cannot be had.
        spin_us: microseconds that a waiting rank is awake before it sleeps; 0 where ranks share processors.
    """

    fd: int
    library: ctypes.CDLL | None
    spin_us: float = 50.0


class ShmCommunicator:
    """See `parallel.communicator.Communicator`; tensors are on the CPU. One thread uses it at a time.

    Args:
        rank: this one's number.
        size: how many there are, 2 … `MAX_RANKS`.
        fd: file descriptor of their memory, see `SharedMemory`; it may be closed afterwards.
        timeout_s: seconds after which a rank that does not come to an operation counts as lost.
        library: the CPU's kernels.
        spin_us: microseconds that a waiting rank is awake before it sleeps; 0 where ranks share processors.
    """

    def __init__(
        self, rank: int, size: int, fd: int, timeout_s: float, library: ctypes.CDLL, spin_us: float = 50.0
    ) -> None:
        assert 2 <= size <= MAX_RANKS and 0 <= rank < size
        self.rank, self.size = rank, size
        self._timeout_s, self._library = timeout_s, library
        num_bytes = size * (_HEADER_BYTES + 2 * _SLOT_BYTES)
        os.truncate(fd, num_bytes)  # the first rank fills it with zeros, and for the others it does nothing
        self._memory = mmap.mmap(fd, num_bytes)  # kept for as long as this rank is
        self._me = _Member(
            region=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            rank=rank,
            size=size,
            slot_bytes=_SLOT_BYTES,
            spin_ns=int(spin_us * 1e3),
            timeout_ns=int(timeout_s * 1e9),
        )
        self._at = ctypes.addressof(self._me)
        self._widths = (ctypes.c_long * size)()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`.

        Raises:
            RankLostError: another rank did not come in time, or does something else.
        """
        x = x.contiguous()
        if x.dtype is not torch.bfloat16 and x.dtype is not torch.float32:
            return self._sum_of_parts(x)
        self._library.stoker_shm_all_reduce(self._at, x.dtype is torch.bfloat16, x.data_ptr(), x.numel())
        self._check()
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`. Ranks ask each other for their widths, in a microsecond: a rank with wrong widths would
        read past the others' data.

        Raises:
            RankLostError: another rank did not come in time, or does something else.
        """
        x = x.contiguous()
        code, rows = _CODES[x.dtype], x.shape[:-1].numel()
        self._widths[self.rank] = x.shape[-1] * x.itemsize
        self._library.stoker_shm_gather_widths(self._at, code, rows, self._widths)
        self._check()
        out = x.new_empty(*x.shape[:-1], sum(self._widths) // x.itemsize)
        self._gather(_GATHER, x, rows, out)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`.

        Raises:
            RankLostError: another rank did not come in time, or does something else.
        """
        x = x.contiguous()
        self._library.stoker_shm_broadcast(self._at, _CODES[x.dtype], x.data_ptr(), x.nbytes)
        self._check()
        return x

    def _sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the kernels do not add up."""
        parts = x.new_empty(self.size, *x.shape)
        self._widths[:] = [x.nbytes] * self.size
        self._gather(_PARTS, x, 1, parts)
        first, *rest = parts.unbind()
        total = first.float() if x.dtype is torch.float16 else first
        for part in rest:
            total += part
        return total.to(x.dtype)

    def _gather(self, operation: int, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        code = _CODES[x.dtype]
        self._library.stoker_shm_all_gather(self._at, operation, code, x.data_ptr(), rows, self._widths, out.data_ptr())
        self._check()

    def _check(self) -> None:
        if self._me.failure:
            self._raise()

    def _raise(self) -> NoReturn:
        me = self._me
        if me.failure == _TIMEOUT:
            late = ", ".join(str(rank) for rank in range(self.size) if me.late_ranks >> rank & 1)
            raise RankLostError(
                f"rank {self.rank} of {self.size} waited in vain for rank {late} ({me.collective}): "
                f"it did not come within {self._timeout_s:g} s"
            )
        assert me.failure == _MISMATCH
        raise RankLostError(
            f"rank {self.rank} of {self.size} came to {me.collective}, and rank {me.mismatched_rank} to "
            f"{me.other_collective}: "
            "ranks must do the same things in the same order"
        )
