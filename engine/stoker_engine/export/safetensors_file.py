"""Writes a safetensors file tensor by tensor. Layout: github.com/huggingface/safetensors

length of the header │ header: JSON of dtypes, shapes, offsets │ data …        wide dtypes first, so all are aligned
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from stoker_engine.models.loading.safetensors_folder import DTYPES

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """Writer of a new file at `path`; tensors can be written in any order.

    Args:
        specs: shapes and dtypes of the tensors by name; may be on the meta device.
    """

    def __init__(self, path: Path, specs: Mapping[str, torch.Tensor]) -> None:
        self._starts, header, start = dict[str, int](), dict[str, object](), 0
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].itemsize):
            end = start + spec.nbytes
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
            self._starts[name], start = start, end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._data = self._file.tell()
        self._specs = specs

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor."""
        assert tensor.dtype == self._specs[name].dtype and tensor.shape == self._specs[name].shape
        self._file.seek(self._data + self._starts[name])
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
