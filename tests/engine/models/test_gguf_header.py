"""GGUF headers, compared with the gguf library's reader; inconsistent ones are refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from stoker_common.errors import ModelError
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.models.gguf.gguf_header import GGUFHeader

_INTEGERS = {
    GGUFValueType.UINT8: (0, 2**8),
    GGUFValueType.INT8: (-(2**7), 2**7),
    GGUFValueType.UINT16: (0, 2**16),
    GGUFValueType.INT16: (-(2**15), 2**15),
    GGUFValueType.UINT32: (0, 2**32),
    GGUFValueType.INT32: (-(2**31), 2**31),
    GGUFValueType.UINT64: (0, 2**64),
    GGUFValueType.INT64: (-(2**63), 2**63),
}
_SCALARS = [*_INTEGERS, GGUFValueType.FLOAT32, GGUFValueType.FLOAT64, GGUFValueType.BOOL, GGUFValueType.STRING]


def _scalar(rng: random.Random, kind: GGUFValueType) -> Any:
    if kind in _INTEGERS:
        return rng.randrange(*_INTEGERS[kind])
    if kind == GGUFValueType.BOOL:
        return rng.random() < 0.5
    if kind == GGUFValueType.STRING:
        return "".join(rng.choices("aä中🙂 \0", k=rng.randrange(12)))
    return float(np.float32(rng.uniform(-9, 9)))


def _write(path: Path, rng: random.Random) -> dict[str, Any]:
    writer = GGUFWriter(path, "llama")
    if rng.random() < 0.5:
        writer.add_custom_alignment(rng.choice([32, 64, 256]))
    values: dict[str, Any] = {}
    for index in range(rng.randrange(40)):
        kind = rng.choice(_SCALARS)
        value = _scalar(rng, kind)
        if rng.random() < 0.5:
            value = [_scalar(rng, kind) for _ in range(rng.choice([1, 2, 33, 5000]))]
            writer.add_key_value(f"k{index}", value, GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(f"k{index}", value, kind)
        values[f"k{index}"] = value
    for index in range(rng.randrange(6)):
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(3))] + [32 * rng.randrange(1, 4)]
        numbers = np.random.default_rng(index).standard_normal(shape, dtype=np.float32)
        kind = rng.choice([GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
        writer.add_tensor(f"t{index}", quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("seed", range(12))
def test_header_equals_that_of_the_gguf_library(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = _write(path, random.Random(seed))
    header, theirs = GGUFHeader(path), GGUFReader(path)
    for key, value in written.items():
        assert header.get(key) == value
    assert header.get("missing") is None and header.get("missing", 5) == 5
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.kind, ours.start) == (tensor.tensor_type, tensor.data_offset)


def _file(keys: list[tuple[bytes, bytes]], tensors: list[bytes], version: int = 3) -> bytes:
    """Return a GGUF file; `keys` are pairs of a key, and its type and value."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    return header + b"".join(_string(key) + value for key, value in keys) + b"".join(tensors) + b"\0" * 4096


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(name: bytes = b"t", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


_ONE = struct.pack("<II", 4, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_file([(b"k", _ONE), (b"k", _ONE)], []), "key 'k' twice"),
        (_file([], [_tensor(), _tensor()]), "tensor 't' twice"),
        (_file([], [_tensor(sizes=(1, 1, 1, 1, 1))]), "5 dimensions"),
        (_file([], [_tensor(sizes=(2**63, 0))]), "dimension of 9223372036854775808"),
        (_file([], [_tensor(kind=77)]), "unknown type 77"),
        (_file([], [_tensor(sizes=(33,), kind=8)]), "33 columns, not a multiple"),
        (_file([], [_tensor(sizes=(2048,))]), "truncated"),
        (_file([], [_tensor(offset=2**63)]), "truncated; download it again"),
        (b"", "it is empty; download it again"),
        (_file([(b"general.alignment", struct.pack("<II", 4, 0))], []), "not a power of two"),
        (_file([(b"general.alignment", struct.pack("<II", 4, 48))], []), "not a power of two"),
        (_file([(b"general.alignment", struct.pack("<I", 8) + _string(b"x"))], []), "not a power of two"),
        (_file([(b"k", struct.pack("<I", 13))], []), "13 is not a valid value type"),
        (_file([], [], version=1), "version is 1"),
        (_file([], [], version=4), "version is 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_headers_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)
