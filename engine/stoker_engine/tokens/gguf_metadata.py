"""The key-value part of a GGUF file, read by itself.

The ``gguf`` library indexes every value of every array, which takes seconds for a vocabulary of 262,144 tokens;
read in one go they take a quarter of one. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker_engine.contract.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: What an array of strings or arrays takes at least, an item.
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12}
_DEEPEST = 16


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Values by key, of the keys that are `wanted`; arrays as lists.

    Raises:
        ModelError: it is no readable GGUF file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).metadata(wanted)
    except KeyError as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error} is no type of a value") from error
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


class _Cursor:
    """A place in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._order = "<"
        if not 1 <= self._scalar("I") <= 0xFFFF:  # the version, in the other byte order
            self._order, self._at = ">", 8

    def metadata(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        self._scalar("Q")  # tensors
        values = {}
        for _ in range(self._scalar("Q")):
            key, kind = self._string(), self._scalar("I")
            value = self._value(kind)
            if wanted(key):
                values[key] = value
        return values

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_SCALARS[kind])

    def _array(self, depth: int = 1) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        item = _LEAST_BYTES[kind] if kind in _LEAST_BYTES else struct.calcsize(self._order + _SCALARS[kind])
        if count * item > len(self._data) - self._at:
            raise ValueError("it ends too early")
        if depth > _DEEPEST:
            raise ValueError("its arrays are nested too deeply")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        layout = f"{self._order}{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(self._order + code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + self._scalar("Q")
        if self._at > len(self._data):
            raise ValueError("it ends too early")
        return self._data[start : self._at].decode(errors="replace")
