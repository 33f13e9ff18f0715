"""Calls lora.cpp: what adapters add to linear operations, also within a call of whole layers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

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


class _Source(ctypes.Structure):
    """lora.cpp's LoraSource."""

    _fields_ = (
        ("rows", _POINTER),
        ("outputs", _LONG),
        ("inner", _LONG),
        ("to", _POINTER),
        ("first", _LONG),
        ("to_inner", _LONG),
        ("is_panels", _LONG),
    )


class AdapterMemory:
    """The memory of one adapter: pages that the system gets back once its matrices are gone, whatever else is in use.

    Matrices are added one by one and filled together, in one call that does not hold Python's lock.

    Args:
        library: of the kernels.
        dtype: of its matrices.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype
        self._in_panels = dtype == torch.bfloat16 and bool(library.stoker_has_panels())
        self._free = torch.empty(0, dtype=torch.uint8)
        self._sources = list[_Source]()
        self._kept = list[torch.Tensor]()  # what the sources point to

    def add(self, weights: Mapping[int, torch.Tensor], outputs: int, inner: int) -> tuple[_Matrix, torch.Tensor]:
        """A matrix [outputs, inner] with these rows, and zeros elsewhere. `fill` writes the rows.

        Args:
            weights: rows of at most `inner` elements, by the first one's place in the matrix.

        Returns:
            The matrix, and the tensor that keeps its memory.
        """
        in_panels = self._in_panels and inner % 2 == 0
        if in_panels:
            outputs += -outputs % PANEL
        memory = self._empty(outputs * inner)
        for first, weight in weights.items():
            assert weight.is_contiguous() and weight.dtype == self._dtype
            address = weight.data_ptr()
            self._sources.append(_Source(address, *weight.shape, memory.data_ptr(), first, inner, in_panels))
            self._kept += (weight, memory)
        return _Matrix(memory.data_ptr(), outputs, inner, in_panels), memory

    def fill(self) -> None:
        """Writes the matrices that have been added."""
        sources = (_Source * len(self._sources))(*self._sources)
        self._library.stoker_pack_lora(ctypes.addressof(sources), len(sources), self._dtype == torch.bfloat16)
        self._sources.clear()
        self._kept.clear()

    def _empty(self, size: int) -> torch.Tensor:
        """Memory of so many elements, all zero."""
        num_bytes = size * self._dtype.itemsize
        taken = -(-num_bytes // _ALIGNED) * _ALIGNED
        if taken > len(self._free):
            self._free = torch.frombuffer(mmap.mmap(-1, max(taken, _CHUNK), flags=_PRIVATE), dtype=torch.uint8)
        memory, self._free = self._free[:num_bytes], self._free[taken:]
        return memory


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
        memory: of the adapter. The matrices may be used once it is filled.

    Attributes:
        num_bytes: of the matrices.
    """

    def __init__(self, parts: Sequence[LoraPart], memory: AdapterMemory) -> None:
        first_ranks, rows, num_ranks = dict[int, int](), dict[int, torch.Tensor](), 0
        for part in parts:
            if id(part.a) not in first_ranks:
                first_ranks[id(part.a)] = num_ranks
                rows[num_ranks] = part.a
                num_ranks += _even(len(part.a))
        a, kept = memory.add(rows, num_ranks, parts[0].a.shape[1])
        self._tensors = [kept]
        self._parts = (_Part * len(parts))()
        for each, part in zip(self._parts, parts, strict=True):
            b, kept = memory.add({0: part.b}, len(part.b), _even(part.b.shape[1]))
            self._tensors.append(kept)
            each.b, each.first_rank = b, first_ranks[id(part.a)]
            each.first_output, each.outputs = part.first_output, len(part.b)
        self.factors = _Factors(a, len(parts), self._parts)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)


def _even(size: int) -> int:
    """The size, or the next one where it is odd."""
    return size + size % 2


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
