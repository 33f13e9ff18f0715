"""Calls lora.cpp: what adapters add to linear operations, also within a call of whole layers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from stoker_engine.kernels.cpu.matrix import ADD_TO_LINEAR, CpuLinear
from stoker_engine.kernels.lora import LoraPart
from stoker_engine.kernels.panels import PANEL

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long

#: Alignment of matrices, in bytes.
_ALIGNED: Final = 64
#: Bytes of a huge page: its first use takes less time than that of 512 small ones.
_HUGE_PAGE: Final = 2 << 20

#: Rows of files that are packed between two pauses; those of a linear operation with 16 ranks are some 30 KB.
_PACKED_SOURCES: Final = 8


class _Matrix(ctypes.Structure):
    """lora.cpp's LoraMatrix."""

    _fields_ = (("w", ctypes.c_size_t), ("outputs", _LONG), ("inner", _LONG), ("is_panels", _LONG))


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
        ("to", _LONG),
        ("first", _LONG),
        ("to_inner", _LONG),
        ("is_panels", _LONG),
    )


class AdapterMemory:
    """The memory of one adapter: pages that the system gets back once its matrices are gone, whatever else is in use.

    Matrices are added one by one; `fill` writes all of them.

    Args:
        library: of the kernels.
        dtype: of its matrices.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype
        self._in_panels = dtype == torch.bfloat16 and bool(library.stoker_has_panels())
        self._size = 0
        self._memory: torch.Tensor | None = None
        self._matrices = list[_Matrix]()
        self._sources = list[_Source]()
        self._weights = list[torch.Tensor]()  # what the sources point to

    def add(self, matrix: _Matrix, weights: Mapping[int, torch.Tensor], outputs: int, inner: int) -> int:
        """Adds a matrix [outputs, inner] with these rows, and zeros elsewhere.

        Args:
            matrix: describes it once `fill` has written it, for as long as this object exists.
            weights: rows of at most `inner` elements, by the first one's place in the matrix.

        Returns:
            The bytes that it takes.
        """
        in_panels = self._in_panels and inner % 2 == 0
        if in_panels:
            outputs += -outputs % PANEL
        offset, num_bytes = self._size, outputs * inner * self._dtype.itemsize
        self._size += -(-num_bytes // _ALIGNED) * _ALIGNED
        for first, weight in weights.items():
            assert weight.is_contiguous() and weight.dtype == self._dtype
            self._sources.append(_Source(weight.data_ptr(), *weight.shape, offset, first, inner, in_panels))
            self._weights.append(weight)
        matrix.w, matrix.outputs, matrix.inner, matrix.is_panels = offset, outputs, inner, in_panels
        self._matrices.append(matrix)
        return num_bytes

    def fill(self, pause: Callable[[], None] = lambda: None) -> None:
        """Writes the matrices that have been added, without Python's lock.

        Args:
            pause: called between parts of the work.
        """
        size = -(-max(self._size, 1) // _HUGE_PAGE) * _HUGE_PAGE  # the system aligns such a mapping
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if whole := self._size // _HUGE_PAGE * _HUGE_PAGE:  # the last one would take memory that nothing uses
            with contextlib.suppress(OSError):  # a system without them
                pages.madvise(mmap.MADV_HUGEPAGE, 0, whole)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        address, is_bf16 = self._memory.data_ptr(), self._dtype == torch.bfloat16
        for start in range(0, len(self._sources), _PACKED_SOURCES):
            sources = self._sources[start : start + _PACKED_SOURCES]
            array = (_Source * len(sources))(*sources)
            self._library.stoker_pack_lora(ctypes.addressof(array), len(sources), is_bf16, address)
            pause()
        for matrix in self._matrices:
            matrix.w += address
        self._matrices.clear()
        self._sources.clear()
        self._weights.clear()


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
                num_ranks += _even(part.a.shape[0])
        self._parts = (_Part * len(parts))()
        self.factors = _Factors(_Matrix(), len(parts), self._parts)
        self.num_bytes = memory.add(self.factors.a, rows, num_ranks, parts[0].a.shape[1])
        for each, part in zip(self._parts, parts, strict=True):
            outputs, rank = part.b.shape
            self.num_bytes += memory.add(each.b, {0: part.b}, outputs, _even(rank))
            each.first_rank, each.first_output, each.outputs = first_ranks[id(part.a)], part.first_output, outputs
        self._memory = memory  # keeps the matrices


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
