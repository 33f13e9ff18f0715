"""Communication between ranks on the CPUs of one machine, by shared memory.

The collectives are in ``kernels/cpu/csrc/comm/shm_collectives.h``. A wait takes about a microsecond if no rank is late.
By default a waiting rank spins for 50 µs and then sleeps until the others arrive. The memory is anonymous, and is freed
when the last process closes it.

Values are added in the order of ranks, narrow dtypes in float32, as in `parallel.torch_communicator`: both give the
same bits.
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

#: Maximum number of ranks with shared memory.
MAX_RANKS: Final = 64

#: Maximum bytes of a rank's data between two waits; larger tensors are split. The memory has two slots per rank.
_SLOT_BYTES: Final = 256 * 1024
_HEADER_BYTES: Final = 128

_SUM, _GATHER, _PARTS, _BROADCAST = range(4)
_OPERATIONS: Final = ("all_reduce", "all_gather", "all_reduce", "broadcast")
_TIMEOUT, _MISMATCH = 1, 2

#: Supported dtypes. Their indices are the codes that ranks compare.
_DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}

_INT, _LONG = ctypes.c_int32, ctypes.c_int64


class _Collective(ctypes.Structure):
    """The struct Collective of shm_collectives.h."""

    _fields_ = (("operation", _INT), ("dtype", _INT), ("rows", _LONG), ("row_bytes", _LONG))

    def __str__(self) -> str:
        """Return text such as "all_gather of 4 × 128 bytes (torch.bfloat16)"."""
        shape = f"{self.rows} × {self.row_bytes}" if self.rows != 1 else str(self.row_bytes)
        return f"{_OPERATIONS[self.operation]} of {shape} bytes ({_DTYPES[self.dtype]})"


class _Member(ctypes.Structure):
    """The struct Member of shm_collectives.h."""

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
    """Shared memory of ranks on the CPUs of one machine.

    Attributes:
        fd: file descriptor of the memory; initially empty, and used by these ranks only.
        library: the CPU kernels; None: not available.
        spin_us: microseconds that a waiting rank spins before it sleeps; 0 if ranks share processors.
    """

    fd: int
    library: ctypes.CDLL | None
    spin_us: float = 50.0


class ShmCommunicator:
    """See `parallel.communicator.Communicator`; tensors are on the CPU. Not thread-safe.

    Args:
        size: number of ranks, 2 … `MAX_RANKS`.
        fd: file descriptor of the memory, see `SharedMemory`; it may be closed afterwards.
        timeout_s: seconds after which a rank that does not join an operation counts as lost.
        library: the CPU kernels.
        spin_us: microseconds that a waiting rank spins before it sleeps; 0 if ranks share processors.
    """

    def __init__(
        self, rank: int, size: int, fd: int, timeout_s: float, library: ctypes.CDLL, spin_us: float = 50.0
    ) -> None:
        assert 2 <= size <= MAX_RANKS and 0 <= rank < size
        self.rank, self.size = rank, size
        self._timeout_s, self._library = timeout_s, library
        num_bytes = size * (_HEADER_BYTES + 2 * _SLOT_BYTES)
        os.truncate(fd, num_bytes)  # the first call extends it with zeros; those of other ranks do nothing
        self._memory = mmap.mmap(fd, num_bytes)  # must live as long as `_me` points to it
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
            RankLostError: another rank did not join in time, or calls another operation.
        """
        x = x.contiguous()
        if x.dtype is not torch.bfloat16 and x.dtype is not torch.float32:
            return self._sum_of_parts(x)
        self._library.stoker_shm_all_reduce(self._at, x.dtype is torch.bfloat16, x.data_ptr(), x.numel())
        self._check()
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`. Instead of using `widths`, ranks exchange their tensors' widths, which takes a
        microsecond: with wrong ones a rank would read beyond the others' data.

        Raises:
            RankLostError: another rank did not join in time, or calls another operation.
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
            RankLostError: another rank did not join in time, or calls another operation.
        """
        x = x.contiguous()
        self._library.stoker_shm_broadcast(self._at, _CODES[x.dtype], x.data_ptr(), x.nbytes)
        self._check()
        return x

    def _sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum for dtypes that the kernels cannot add."""
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
                f"rank {self.rank} of {self.size} did not hear from rank {late} within {self._timeout_s:g} s "
                f"({me.collective})"
            )
        assert me.failure == _MISMATCH
        raise RankLostError(
            f"rank {self.rank} of {self.size} called {me.collective}, but rank {me.mismatched_rank} called "
            f"{me.other_collective}: "
            "all ranks must call the same operations in the same order"
        )
