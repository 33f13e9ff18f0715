"""Tensors by name that count the bytes read from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stoker_engine.quant.checkpoints.module import Part, StoredModule


class StoredTensors:
    """`Tensors` in memory that count the bytes read.

    Attributes:
        read_bytes: number of bytes read so far.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.read_bytes = 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> torch.Size:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        if part is not None:
            assert len(part) == tensor.dim() > 0, "each dimension needs a slice"
            for cut, size in zip(part, tensor.shape, strict=True):
                assert cut.step is None and 0 <= cut.start < cut.stop <= size, f"{name}: {part} of {tensor.shape}"
            tensor = tensor[part]
        self.read_bytes += tensor.numel() * tensor.itemsize
        return tensor.clone()


def whole(module: StoredModule) -> Part:
    """Return all of a module's matrix."""
    return tuple(slice(0, size) for size in module.shape)
