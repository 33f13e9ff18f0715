"""Binding of lora.cpp: LoRA adapters of linear operations, also within calls of whole layers."""

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

#: Allocation unit of an adapter's memory, and alignment of its tensors, both in bytes.
_CHUNK: Final = 1 << 20
_ALIGNED: Final = 64
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Matrix(ctypes.Structure):
    """`LoraMatrix` of lora.cpp."""

    _fields_ = (("w", _POINTER), ("outputs", _LONG), ("inner", _LONG), ("is_panels", _LONG))


class _Part(ctypes.Structure):
    """`LoraPart` of lora.cpp."""

    _fields_ = (("b", _Matrix), ("first_rank", _LONG), ("first_output", _LONG), ("outputs", _LONG))


class _Factors(ctypes.Structure):
    """`LoraFactors` of lora.cpp."""

    _fields_ = (("a", _Matrix), ("num_parts", _LONG), ("parts", ctypes.POINTER(_Part)))


class _Table(ctypes.Structure):
    """`LoraTable` of lora.cpp."""

    _fields_ = (("slots", _POINTER), ("num_rows", _LONG), ("num_slots", _LONG))


class _Site(ctypes.Structure):
    """`LoraSite` of lora.cpp."""

    _fields_ = (("table", ctypes.POINTER(_Table)), ("factors", _POINTER))


class _Source(ctypes.Structure):
    """`LoraSource` of lora.cpp."""

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
    """Memory of one adapter, in pages of its own, which are returned to the system when the adapter is unloaded.

    Matrices are added one by one and filled together, in one call that does not hold the GIL.

    Args:
        library: library of the kernels.
        dtype: dtype of the matrices.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype
        self._in_panels = dtype == torch.bfloat16 and bool(library.stoker_has_panels())
        self._free = torch.empty(0, dtype=torch.uint8)
        self._sources = list[_Source]()
        self._kept = list[torch.Tensor]()  # keeps the tensors of the sources alive

    def add(self, weights: Mapping[int, torch.Tensor], outputs: int, inner: int) -> tuple[_Matrix, torch.Tensor]:
        """Allocate a matrix [outputs, inner] with the given rows and zeros elsewhere. `fill` writes the rows.

        Args:
            weights: blocks of rows with at most `inner` elements, by the index of their first row.

        Returns:
            The matrix, and the tensor that owns its memory.
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
        """Write the rows of all matrices added since the last call."""
        sources = (_Source * len(self._sources))(*self._sources)
        self._library.stoker_pack_lora(ctypes.addressof(sources), len(sources), self._dtype == torch.bfloat16)
        self._sources.clear()
        self._kept.clear()

    def _empty(self, size: int) -> torch.Tensor:
        """Allocate zeroed memory of `size` elements."""
        num_bytes = size * self._dtype.itemsize
        taken = -(-num_bytes // _ALIGNED) * _ALIGNED
        if taken > len(self._free):
            self._free = torch.frombuffer(mmap.mmap(-1, max(taken, _CHUNK), flags=_PRIVATE), dtype=torch.uint8)
        memory, self._free = self._free[:num_bytes], self._free[taken:]
        return memory


class CpuLoraTable:
    """Slots of the rows of the input batch, for all operations of a model.

    Args:
        num_slots: number of adapter slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots: Final = num_slots
        self.table = _Table(None, 0, num_slots)
        self._slots: torch.Tensor | None = None

    def read_from(self, slots: torch.Tensor) -> None:
        """Set the tensor from which slots are read, int64 [rows + 1]; see `BatchRows.adapters`."""
        assert slots.dtype == torch.int64 and slots.is_contiguous()
        self._slots = slots
        self.table.slots, self.table.num_rows = slots.data_ptr(), len(slots) - 1


class CpuLoraFactors:
    """An adapter's factors for one linear operation, in the layout that the kernel multiplies.

    Args:
        parts: parts of the merged matrices that the adapter changes.
        memory: the adapter's memory. The factors can be used after `AdapterMemory.fill`.

    Attributes:
        num_bytes: size of the matrices in bytes.
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
    """Round `size` up to an even number."""
    return size + size % 2


class CpuLoraSite:
    """The adapters of one linear operation, by slot."""

    def __init__(self, library: ctypes.CDLL, table: CpuLoraTable) -> None:
        self._library, self._table = library, table
        self._held: list[CpuLoraFactors | None] = [None] * table.num_slots
        self._pointers = (_POINTER * table.num_slots)()
        self._site = _Site(ctypes.pointer(table.table), ctypes.addressof(self._pointers))
        self._add = ctypes.cast(library.stoker_address_of_add_lora(), ADD_TO_LINEAR)

    def set(self, slot: int, factors: CpuLoraFactors | None) -> None:
        """Set the factors of a slot; None for no adapter. Must not be called while a step runs."""
        self._held[slot] = factors
        self._pointers[slot] = None if factors is None else ctypes.addressof(factors.factors)

    def extended(self, linear: CpuLinear, batch_rows: Callable[[], torch.Tensor]) -> CpuLinear:
        """Return the operation extended by the adapters; for `batch_rows` see `CpuLinear.extended`."""
        return linear.extended(self._library, self._add, ctypes.addressof(self._site), batch_rows)
