"""A tensor in a GGUF file: rows of blocks. Any part can be read without the rest.

row    │ block │ block │ block │ …        elements and bytes of a block depend on the type
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from os import preadv
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.models.gguf.gguf_header import GGUFHeader
from stoker_engine.models.loading.weight_source import Part

#: Approximate number of elements read at a time.
_PIECE: Final = 1 << 18

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        start: offset of the data in the file, in bytes.
    """

    name: str
    file: BinaryIO
    shape: torch.Size
    kind: GGMLQuantizationType
    start: int

    @cached_property
    def whole(self) -> Part:
        """Slices that select the whole tensor."""
        return tuple(slice(0, size) for size in self.shape)

    def dequantize(self, part: Part, target: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        """Dequantize `part` into the contiguous `target`, converted to its dtype.

        The library processes 16 rows at a time, so for a vocabulary's many short rows the calls would dominate.
        Therefore several rows are passed as one long row, small enough to stay in the CPU cache.

        Raises:
            WeightsError: the library cannot dequantize the type, or the file cannot be read.
        """
        if not target.numel():
            return
        block, _ = GGML_QUANT_SIZES[self.kind]
        columns = part[-1] if part else slice(0, 1)
        within = slice(columns.start % block, columns.start % block + columns.stop - columns.start)
        rows = target.view(-1, columns.stop - columns.start)

        def unpack(first: int, packed: Bytes) -> None:
            numbers = dequantize(packed.reshape(1, -1), self.kind).reshape(len(packed), -1)[:, within]
            rows[first : first + len(packed)] = torch.from_numpy(numbers)

        try:
            self._each(part, unpack, threads)
        except NotImplementedError as error:
            raise WeightsError(f"{self.name}: GGUF type {self.kind.name} cannot be dequantized") from error

    def copy(self, part: Part, target: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        """Copy the blocks of `part`, which must be cut between blocks, into the contiguous uint8 `target`.

        Raises:
            WeightsError: the file cannot be read.
        """
        if not target.numel():
            return
        rows = target.view(-1, target.shape[-1])

        def take(first: int, packed: Bytes) -> None:
            rows[first : first + len(packed)] = torch.from_numpy(packed)

        self._each(part, take, threads)

    def _each(self, part: Part, take: Callable[[int, Bytes], None], threads: ThreadPoolExecutor) -> None:
        """Read the rows of `part` in chunks, in threads. Call `take` for each chunk with the index of its first row
        within the part, and the blocks that contain the part's columns, uint8 [rows, bytes]."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        columns = part[-1] if part else slice(0, 1)
        row_bytes = (self.shape[-1] if self.shape else 1) // block * block_bytes
        skipped = columns.start // block * block_bytes
        width = -(-columns.stop // block) * block_bytes - skipped

        def read(run: tuple[int, int, int]) -> None:
            row, first, count = run
            packed = np.empty((count, width), dtype=np.uint8)
            if width == row_bytes:
                self._read(packed.data.cast("B"), row * row_bytes)
            else:
                for index in range(count):
                    self._read(packed[index].data, (row + index) * row_bytes + skipped)
            with torch.inference_mode():  # the mode is per thread, and targets are inference tensors
                take(first, packed)

        at_once = max(_PIECE // (width // block_bytes * block), 1)
        list(threads.map(read, self._runs(part, at_once)))

    def _runs(self, part: Part, at_once: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of at most `at_once` adjacent rows of `part`: first row in the file, in the part, and count."""
        leading = self.shape[:-1] or (1,)
        slices = part[:-1] or (slice(0, 1),)
        done = 0
        for outer in product(*(range(each.start, each.stop) for each in slices[:-1])):
            base = 0
            for index, size in zip((*outer, 0), leading, strict=True):
                base = base * size + index
            for start in range(slices[-1].start, slices[-1].stop, at_once):
                count = min(at_once, slices[-1].stop - start)
                yield base + start, done, count
                done += count

    def _read(self, target: memoryview, start: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = preadv(self.file.fileno(), [target[done:]], self.start + start + done)
            except OSError as error:
                raise WeightsError(f"{self.name}: cannot read {self.file.name}: {error}") from error
            if not count:
                raise WeightsError(f"{self.name}: {self.file.name} was truncated while loading")
            done += count


def stored_tensors(path: Path, header: GGUFHeader) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, after checking that their data lie within the file.

    Raises:
        ModelError: a tensor exceeds the file, has an unknown type, or has rows that are not whole blocks.
    """
    file = path.open("rb")
    size, stored = path.stat().st_size, dict[str, StoredTensor]()
    for name, tensor in header.tensors.items():
        if tensor.kind not in GGML_QUANT_SIZES:
            raise ModelError(f"{path}: {name[:100]} has the unknown type {tensor.kind}; try a newer gguf library")
        kind = GGMLQuantizationType(tensor.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if tensor.shape and tensor.shape[-1] % block:
            raise ModelError(
                f"{path}: {name[:100]} has {tensor.shape[-1]} columns, not a multiple of {kind.name}'s {block}"
            )
        if tensor.start + math.prod(tensor.shape) // block * block_bytes > size:
            raise ModelError(f"{path} is not a readable GGUF file: it is truncated; download it again")
        stored[name] = StoredTensor(name, file, torch.Size(tensor.shape), kind, tensor.start)
    return stored
