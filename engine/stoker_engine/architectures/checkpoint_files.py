"""Quantization and dtype from other files of a checkpoint, for a config.json that does not state them.

    hf_quant_config.json      quantization, as older versions of Model Optimizer write it
    safetensors headers       most common compute dtype in the first file by name

The engine and the planner complete a config in the same way, from a folder or the hub.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.stated import stated_quantization
from stoker_engine.architectures.text_config import text_of
from stoker_engine.contract.json_file import read_json_object

QUANTIZATION: Final = "hf_quant_config.json"
INDEX: Final = "model.safetensors.index.json"
#: Maximum size of a safetensors header in bytes. A header with tens of thousands of tensors takes a few MB.
_LARGEST_HEADER: Final = 16 << 20
#: Compute dtypes: safetensors' name → config.json's name.
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class CheckpointFiles(Protocol):
    """The files of a checkpoint.

    Attributes:
        weights: possible names of safetensors files, for checkpoints without an index.
    """

    @property
    def weights(self) -> Sequence[str]: ...

    def json(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON object in a file, or None if the file does not exist."""
        ...

    def header(self, name: str) -> Mapping[str, Any] | None:
        """Return the header of a safetensors file, or None if the file does not exist or has no valid header."""
        ...


class Folder:
    """The files of a checkpoint in a local folder; see `CheckpointFiles`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def weights(self) -> list[str]:
        """See `CheckpointFiles`."""
        return sorted(path.name for path in self._path.glob("*.safetensors"))

    def json(self, name: str) -> Mapping[str, Any] | None:
        """See `CheckpointFiles`.

        Raises:
            ModelError: the file does not contain a JSON object.
        """
        try:
            return read_json_object(self._path / name)
        except FileNotFoundError:
            return None

    def header(self, name: str) -> Mapping[str, Any] | None:
        """See `CheckpointFiles`. Unreadable files are reported when the weights are loaded."""
        try:
            with (self._path / Path(name).name).open("rb") as file:
                return read_header(file)
        except OSError:
            return None


def complete_config(config: Mapping[str, Any], files: CheckpointFiles) -> dict[str, Any]:
    """Return a parsed config.json, completed with the quantization and the dtype from the checkpoint's other files.

    Raises:
        ModelError: a JSON file, or ``quantization_config``, is invalid.
    """
    completed = dict(config)
    if stated_quantization(config) is None and (beside := files.json(QUANTIZATION)) is not None:
        inner = Fields(beside, {}, file=QUANTIZATION).object("quantization") or beside
        if inner.get("quant_algo"):  # the file may describe only the KV cache
            completed["quantization_config"] = beside
    if not any(part.get(name) for part in (config, text_of(config)) for name in ("dtype", "torch_dtype")):
        dtype = _dtype(files)
        if dtype is not None:
            completed["dtype"] = dtype
    return completed


def read_header(file: BinaryIO) -> Mapping[str, Any] | None:
    """Return the header at the start of a safetensors file, or None if the header is invalid.

    Raises:
        OSError: the file cannot be read.
    """
    size = int.from_bytes(_read(file, 8), "little")
    if not 0 < size <= _LARGEST_HEADER:
        return None
    try:
        header = json.loads(_read(file, size))
    except (ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _read(file: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file. A single `read` may return fewer bytes."""
    found = bytearray()
    while len(found) < size and (part := file.read(size - len(found))):
        found += part
    return bytes(found)


def _dtype(files: CheckpointFiles) -> str | None:
    index = files.json(INDEX)
    named = [] if index is None else map(str, Fields(index, {}, file=INDEX).object("weight_map").values())
    first = min(named, default=None) or next(iter(files.weights), None)
    header = None if first is None else files.header(first)
    return None if header is None else _most_common(header)


def _most_common(header: Mapping[str, Any]) -> str | None:
    """Return the compute dtype with the most elements, or None if no tensor has one. Codes of quantized matrices have
    other dtypes, and scales are few."""
    numbers: Counter[str] = Counter()
    for tensor in header.values():
        if not isinstance(tensor, Mapping) or str(tensor.get("dtype")) not in _DTYPES:
            continue
        shape = tensor.get("shape")
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            numbers[_DTYPES[str(tensor["dtype"])]] += prod(shape)
    return max(numbers, key=lambda dtype: numbers[dtype], default=None)
