"""Binding of lora.cpp: LoRA adapters of linear operations, also within calls of whole layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import torch

from stoker_engine.kernels.cpu.matrix import ADD_TO_LINEAR, CpuLinear
from stoker_engine.kernels.cpu.own_pages import HUGE_PAGE, own_pages
from stoker_engine.kernels.lora import LoraPart
from stoker_engine.kernels.panels import PANEL

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long

_Key = TypeVar("_Key", bound=Hashable)

#: Alignment of matrices, in bytes.
_ALIGNED: Final = 64

#: Number of sources (blocks of an adapter's rows) that are packed between two pauses.
_PACKED_SOURCES: Final = 8


class _Matrix(ctypes.Structure):
    """`LoraMatrix` of lora.cpp."""

    _fields_ = (("w", ctypes.c_size_t), ("outputs", _LONG), ("inner", _LONG), ("is_panels", _LONG))


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
        ("rows", ctypes.c_size_t),
        ("outputs", _LONG),
        ("inner", _LONG),
        ("to", _LONG),
        ("first", _LONG),
        ("to_inner", _LONG),
        ("is_panels", _LONG),
    )


class AdapterMemory:
    """Memory of one adapter, in pages of its own, which are returned to the system when the adapter is unloaded.

    Matrices are added one by one; `fill` allocates the memory and writes all of them.

    Args:
        library: library of the kernels.
        dtype: dtype of the matrices.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype
        self._in_panels = dtype == torch.bfloat16 and bool(library.stoker_has_panels())
        self._size = 0
        self._memory: torch.Tensor | None = None
        self._matrices = list[_Matrix]()
        self._sources = list[_Source]()
        self._weights = list[torch.Tensor]()  # keeps the memory of the sources alive

    def add(self, matrix: _Matrix, weights: Mapping[int, torch.Tensor], outputs: int, inner: int) -> int:
        """Add a matrix [outputs, inner] that contains `weights`, and zeros elsewhere.

        Args:
            matrix: description to fill in. It is valid after `fill`, while this object exists.
            weights: blocks of rows, each row of at most `inner` elements, by the index of the block's first row in the
                matrix.

        Returns:
            Size of the matrix in bytes.
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
        self.relocate(matrix)
        return num_bytes

    def relocate(self, *matrices: _Matrix) -> None:
        """Have `fill` add the memory's address to these matrices' offsets."""
        self._matrices += matrices

    def is_within(self, content: torch.Tensor) -> bool:
        """Whether all matrices that were added are views of `content`."""
        start = content.data_ptr()
        return all(start <= weight.data_ptr() < start + content.nbytes for weight in self._weights)

    def moved(self, distance: int, content: torch.Tensor | None) -> AdapterMemory:
        """Return memory for matrices of the same sizes, whose sources have addresses that are `distance` bytes larger.

        Args:
            content: tensor that contains the sources, kept alive until `fill`; None: the sources are not kept alive.
        """
        memory = AdapterMemory(self._library, self._dtype)
        memory._size = self._size
        memory._sources = [_Source.from_buffer_copy(source) for source in self._sources]
        for source in memory._sources:
            source.rows += distance
        memory._weights = [] if content is None else [content]
        return memory

    def fill(self, pause: Callable[[], None] = lambda: None) -> None:
        """Allocate the memory and write the matrices, without the GIL.

        Args:
            pause: called after each `_PACKED_SOURCES` sources.
        """
        size = -(-max(self._size, 1) // HUGE_PAGE) * HUGE_PAGE  # so that Linux aligns the mapping to huge pages
        # Huge pages are not requested for the end: a huge page that is used in part wastes memory.
        self._memory = own_pages(size, self._size // HUGE_PAGE * HUGE_PAGE)
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


class PackedLayout(Generic[_Key]):
    """The layout of an adapter's packed matrices, the same for all adapters whose files have equal layouts.

    Args:
        memory: memory of an adapter, to which all matrices have been added, but which is not filled.
        factors: the adapter's factors, by an arbitrary key.
        content: content of the file that the matrices are views of, see `AdapterMemory.is_within`.
    """

    def __init__(self, memory: AdapterMemory, factors: Mapping[_Key, CpuLoraFactors], content: torch.Tensor) -> None:
        self._memory = memory.moved(-content.data_ptr(), None)  # addresses become offsets in the file
        self._factors = {key: each.moved(self._memory) for key, each in factors.items()}

    def of(self, content: torch.Tensor) -> tuple[AdapterMemory, dict[_Key, CpuLoraFactors]]:
        """Return the memory of another adapter, to be filled, and its factors.

        Args:
            content: content of the adapter's file, uint8 [bytes].
        """
        memory = self._memory.moved(content.data_ptr(), content)
        return memory, {key: each.moved(memory) for key, each in self._factors.items()}


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
                num_ranks += _even(part.a.shape[0])
        self._parts = (_Part * len(parts))()
        self.factors = _Factors(_Matrix(), len(parts), self._parts)
        self.num_bytes = memory.add(self.factors.a, rows, num_ranks, parts[0].a.shape[1])
        for each, part in zip(self._parts, parts, strict=True):
            outputs, rank = part.b.shape
            self.num_bytes += memory.add(each.b, {0: part.b}, outputs, _even(rank))
            each.first_rank, each.first_output, each.outputs = first_ranks[id(part.a)], part.first_output, outputs
        self._memory = memory  # keeps the matrices alive

    def moved(self, memory: AdapterMemory) -> CpuLoraFactors:
        """Return factors of the same sizes in `memory`, which must not be filled yet."""
        factors = CpuLoraFactors.__new__(CpuLoraFactors)
        factors._parts = type(self._parts).from_buffer_copy(self._parts)
        factors.factors = _Factors(self.factors.a, len(factors._parts), factors._parts)
        factors.num_bytes, factors._memory = self.num_bytes, memory
        memory.relocate(factors.factors.a, *(part.b for part in factors._parts))
        return factors


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
