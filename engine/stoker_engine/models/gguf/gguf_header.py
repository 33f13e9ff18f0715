"""Header of a GGUF file: metadata by key, and the location of each tensor. Needs neither torch nor numpy.

    "GGUF" │ version │ number of tensors │ number of keys │ key, type, value …  │ name, sizes, type, offset … │ data …

The header is scanned once, and values are decoded on access: creating Python objects for a vocabulary of 262,144 tokens
takes longer than everything else, and only a tokenizer needs them. The file may be damaged or malicious, so counts are
limited and offsets checked. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import ModelError

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS: Final = (2, 3)  # version 1 had 32-bit counts

_DEEPEST: Final = 16  # maximum depth of nested arrays
_MOST_DIMENSIONS: Final = 4  # ggml's maximum
_MOST_KEYS, _MOST_TENSORS = 100_000, 1_000_000

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Location, shape and type of a tensor.

    Attributes:
        shape: shape in torch's order, the contiguous dimension last.
        kind: number of the ggml type.
        start: offset of the data in the file, in bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFHeader:
    """The header of the GGUF file at `path`.

    Attributes:
        tensors: tensors by name, in the file's order.

    Raises:
        ModelError: the file is not a readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self._values: dict[str, tuple[int, int]] = {}  # key → type and offset of the value
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            if path.stat().st_size == 0:  # `mmap` refuses empty files
                raise _unreadable(path, "it is empty; download it again")
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._pass_over()
        except (struct.error, OverflowError):
            raise _unreadable(path, "it is truncated; download it again") from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of `key`, arrays as lists, or `default` if there is none."""
        return self._value(*self._values[key])[0] if key in self._values else default

    def stored(self) -> dict[str, tuple[int, bytes]]:
        """Return the raw metadata: for each key the number of the value's type, and the value's bytes."""
        return {key: (kind, self._data[at : self._past(kind, at)]) for key, (kind, at) in self._values.items()}

    def _pass_over(self) -> None:
        """Scan the header for the offsets of values and tensors."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._data, 4)
        if version not in _VERSIONS:
            if int.from_bytes(self._data[4:8], "big") in _VERSIONS:
                raise ValueError("it is big-endian; convert it with gguf-convert-endian")
            raise ValueError(f"its version is {version}; supported are {_VERSIONS[0]} and {_VERSIONS[1]}")
        if num_keys > _MOST_KEYS or num_tensors > _MOST_TENSORS:
            raise ValueError(f"it holds {num_keys} keys and {num_tensors} tensors, more than any real model has")
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at)
            if key in self._values:
                raise ValueError(f"it holds the key {key[:100]!r} twice")
            (kind,) = _U32.unpack_from(self._data, at)
            self._values[key] = (kind, at + 4)
            at = self._past(kind, at + 4)
        tensors = dict[str, GGUFTensor]()
        for _ in range(num_tensors):
            name, tensor, at = self._tensor(at)
            if name in tensors:
                raise ValueError(f"it holds the tensor {name[:100]!r} twice")
            tensors[name] = tensor
        data = at + -at % self._alignment()
        self.tensors = {
            name: GGUFTensor(tensor.shape, tensor.kind, data + tensor.start) for name, tensor in tensors.items()
        }

    def _tensor(self, at: int) -> tuple[str, GGUFTensor, int]:
        """Return name, description (offset relative to the data section), and the offset after the entry."""
        name, at = self._string(at)
        (dimensions,) = _U32.unpack_from(self._data, at)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(
                f"its tensor {name[:100]!r} has {dimensions} dimensions; the maximum is {_MOST_DIMENSIONS}"
            )
        *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._data, at + 4)
        if max(sizes, default=0) > len(self._data) * 8:
            raise ValueError(f"its tensor {name[:100]!r} has a dimension of {max(sizes)}, too large for the file")
        return name, GGUFTensor(tuple(reversed(sizes)), kind, offset), at + 16 + 8 * dimensions

    def _alignment(self) -> int:
        alignment = self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {str(alignment)[:100]}, which is not a power of two")
        return alignment

    def _past(self, kind: int, at: int, depth: int = 0) -> int:
        """Return the end offset of the value at `at`."""
        if kind == _STRING:
            end = at + 8 + _U64.unpack_from(self._data, at)[0]
        elif kind == _ARRAY:
            if depth == _DEEPEST:
                raise ValueError("its arrays are nested too deeply")
            item, count = struct.unpack_from("<IQ", self._data, at)
            end = at + 12
            if item == _STRING:
                length, data = _U64.unpack_from, self._data
                for _ in range(count):
                    end += 8 + length(data, end)[0]
            elif item == _ARRAY:
                for _ in range(count):
                    end = self._past(item, end, depth + 1)
            else:
                end += count * _scalar_bytes(item)
        else:
            end = at + _scalar_bytes(kind)
        if end > len(self._data):
            raise ValueError("it is truncated")
        return int(end)

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        """Return the value at `at` and its end offset. The scan has checked that it lies within the file."""
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            (value,) = struct.unpack_from("<" + _SCALARS[kind], self._data, at)
            return value, at + _scalar_bytes(kind)
        item, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if item in _SCALARS:
            layout = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack_from(layout, self._data, at)), at + struct.calcsize(layout)
        items = list[Any]()
        if item == _STRING:  # inlined because a vocabulary has very many strings
            data, length = self._data, _U64.unpack_from
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                items.append(data[start:at].decode(errors="replace"))
            return items, at
        for _ in range(count):
            value, at = self._value(item, at)
            items.append(value)
        return items, at

    def _string(self, at: int) -> tuple[str, int]:
        start = at + 8
        end = start + _U64.unpack_from(self._data, at)[0]
        if end > len(self._data):
            raise ValueError("it is truncated")
        return self._data[start:end].decode(errors="replace"), end


def _scalar_bytes(kind: int) -> int:
    if kind not in _SCALARS:
        raise ValueError(f"{kind} is not a valid value type")
    return struct.calcsize("<" + _SCALARS[kind])


def _unreadable(path: Path, why: object) -> ModelError:
    return ModelError(f"{path} is not a readable GGUF file: {why}")
