"""Calls lora.cpp: what adapters add to linear operations, also within a call of whole layers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.nn.functional import pad

from stoker_engine.kernels.cpu.matrix import ADD_TO_LINEAR, CpuLinear
from stoker_engine.kernels.lora import LoraPart
from stoker_engine.kernels.panels import PANEL

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long

#: Bytes: what an adapter's memory grows by, and where its tensors begin.
_CHUNK: Final = 1 << 20
_ALIGNED: Final = 64
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Matrix(ctypes.Structure):
    """lora.cpp's LoraMatrix."""

    _fields_ = (("w", _POINTER), ("outputs", _LONG), ("inner", _LONG), ("is_panels", _LONG))


class _Part(ctypes.Structure):
    """lora.cpp's LoraPart."""

    _fields_ = (("b", _Matrix), ("first_rank", _LONG), ("first_output", _LONG), ("outputs", _LONG))


class _Factors(ctypes.Structure):
    """lora.cpp's LoraFactors."""

    _fields_ = (("a", _Matrix), ("num_parts", _LONG), ("parts", ctypes.POINTER(_Part)))


class _Table(ctypes.Structure):
    """lora.cpp's LoraTable."""

    _fields_ = (("slots", _POINTER), ("num_rows", _LONG), ("num_slots", _LONG))


class _Site(ctypes.Structure):
    """lora.cpp's LoraSite."""

    _fields_ = (("table", ctypes.POINTER(_Table)), ("factors", _POINTER))


class AdapterMemory:
    """The memory of one adapter: pages that the system gets back once its tensors are gone, whatever else is in use.

    Args:
        dtype: of its tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._free = dtype, torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: torch.Size) -> torch.Tensor:
        """A tensor of any content."""
        num_bytes = shape.numel() * self._dtype.itemsize
        taken = -(-num_bytes // _ALIGNED) * _ALIGNED
        if taken > len(self._free):
            self._free = torch.frombuffer(mmap.mmap(-1, max(taken, _CHUNK), flags=_PRIVATE), dtype=torch.uint8)
        memory, self._free = self._free[:num_bytes], self._free[taken:]
        return memory.view(self._dtype).view(shape)


class CpuLoraTable:
    """Which slot each row of the input batch has, for all operations of a model.

    Args:
        num_slots: of adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots: Final = num_slots
        self.table = _Table(None, 0, num_slots)
        self._slots: torch.Tensor | None = None

    def read_from(self, slots: torch.Tensor) -> None:
        """Reads the slots from this tensor from now on: int64 [rows + 1], see `BatchRows.adapters`."""
        assert slots.dtype == torch.int64 and slots.is_contiguous()
        self._slots = slots
        self.table.slots, self.table.num_rows = slots.data_ptr(), len(slots) - 1


class CpuLoraFactors:
    """What an adapter adds to one linear operation, in the order in which it is multiplied.

    Args:
        parts: of the matrices merged into the operation, those that it changes.
        empty: makes a tensor of this shape, for the matrices; None: torch does.

    Attributes:
        num_bytes: of the matrices.
    """

    def __init__(
        self, library: ctypes.CDLL, parts: Sequence[LoraPart], empty: Callable[[torch.Size], torch.Tensor] | None = None
    ) -> None:
        dtype = parts[0].a.dtype
        in_panels = dtype == torch.bfloat16 and bool(library.stoker_has_panels())
        first_ranks, rows, num_ranks = dict[int, int](), list[torch.Tensor](), 0
        for part in parts:
            if id(part.a) not in first_ranks:
                first_ranks[id(part.a)] = num_ranks
                rows.append(_even(part.a, 0))
                num_ranks += len(rows[-1])
        self._tensors, self._empty = list[torch.Tensor](), empty
        each = (_Part * len(parts))(
            *(
                _Part(
                    self._matrix(_even(part.b, 1), in_panels),
                    first_ranks[id(part.a)],
                    part.first_output,
                    len(part.b),
                )
                for part in parts
            )
        )
        a = rows[0] if len(rows) == 1 else torch.cat(rows)
        self.factors = _Factors(self._matrix(a, in_panels), len(parts), each)
        self._parts = each
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)

    def _matrix(self, weight: torch.Tensor, in_panels: bool) -> _Matrix:
        outputs, inner = weight.shape
        in_panels = in_panels and inner % 2 == 0
        padding = -outputs % PANEL if in_panels else 0
        shape = torch.Size((outputs + padding, inner))
        matrix = torch.empty(shape, dtype=weight.dtype) if self._empty is None else self._empty(shape)
        if in_panels:
            # See `kernels.panels`; two numbers of bfloat16 are moved as one of four bytes.
            weight = pad(weight, (0, 0, 0, padding)) if padding else weight
            pairs = weight.contiguous().view(torch.int32).view(-1, PANEL, inner // 2)
            matrix.view(torch.int32).view(-1, inner // 2, PANEL).copy_(pairs.transpose(1, 2))
        else:
            matrix.copy_(weight)
        self._tensors.append(matrix)
        return _Matrix(matrix.data_ptr(), len(matrix), inner, in_panels)


def _even(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """With a row, or column, of zeros behind where their number is odd."""
    if weight.shape[dim] % 2 == 0:
        return weight
    return pad(weight, (0, 0, 0, 1) if dim == 0 else (0, 1))


class CpuLoraSite:
    """A linear operation and what the adapters in the slots add to it."""

    def __init__(self, library: ctypes.CDLL, table: CpuLoraTable) -> None:
        self._library, self._table = library, table
        self._held: list[CpuLoraFactors | None] = [None] * table.num_slots
        self._pointers = (_POINTER * table.num_slots)()
        self._site = _Site(ctypes.pointer(table.table), ctypes.addressof(self._pointers))
        self._add = ctypes.cast(library.stoker_address_of_add_lora(), ADD_TO_LINEAR)

    def set(self, slot: int, factors: CpuLoraFactors | None) -> None:
        """Has a slot add `factors` from now on; None: nothing. No step may run meanwhile."""
        self._held[slot] = factors
        self._pointers[slot] = None if factors is None else ctypes.addressof(factors.factors)

    def extended(self, linear: CpuLinear, batch_rows: Callable[[], torch.Tensor]) -> CpuLinear:
        """The operation with what is added to it; for `batch_rows` see `CpuLinear.extended`."""
        return linear.extended(self._library, self._add, ctypes.addressof(self._site), batch_rows)
