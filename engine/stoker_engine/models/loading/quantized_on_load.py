"""Quantization of an unquantized checkpoint while it is loaded (``--quantization int8``)."""

from __future__ import annotations

import torch

from stoker_common.errors import ArgumentError, WeightsError
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.models.loading.weight_source import Part, WeightSource, check_shape
from stoker_engine.quant.weight_target import WeightTarget
from stoker_engine.sizing.quantized_weights import canonical_method


def method_on_load(requested: str | None, stated: str | None) -> str | None:
    """Return the method of `ON_LOAD` by which matrices are quantized while loading, or None if they keep the
    checkpoint's format.

    Args:
        requested: value of ``--quantization``.
        stated: quantization method of the checkpoint; None if it is not quantized.

    Raises:
        ArgumentError: the checkpoint is quantized by another method, or `requested` is not possible while loading.
    """
    if requested is None or (stated is not None and canonical_method(requested) == canonical_method(stated)):
        return None
    if stated is not None:
        raise ArgumentError(
            "--quantization",
            f"{requested} is requested, but the checkpoint is already quantized by {stated}; leave it out",
        )
    if requested not in ON_LOAD:
        raise ArgumentError(
            "--quantization",
            f"{requested} is requested, but the checkpoint is not quantized; methods that quantize while loading are "
            f"{', '.join(ON_LOAD)}",
        )
    return requested


class QuantizedOnLoad:
    """A `WeightSource` that quantizes matrices as they are read, in groups that share a scale, rounding to nearest.

    Args:
        numbers: source of the unquantized weights. Each read quantizes again: results are not cached.
    """

    def __init__(self, numbers: WeightSource) -> None:
        self._numbers = numbers

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return self._numbers.names()

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        return self._numbers.shape(name)

    def stored(self, name: str) -> StoredFormat | None:
        """See `WeightSource`: the format in the files, before quantization."""
        return self._numbers.stored(name)

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`. If `stored` is a `GroupFormat`, quantize to it; `part` must split rows between groups.

        Raises:
            WeightsError: values to quantize include NaN or infinity.
        """
        if isinstance(stored, GroupFormat):
            return quantized(name, self._numbers.read(name, part), stored)
        return self._numbers.read(name, part, stored)

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`."""
        if isinstance(target.stored, GroupFormat):
            check_shape(name, self.shape(name), target)
            target.tensor.copy_(self.read(name, target.shard, target.stored))
        else:
            self._numbers.read_into(name, target)


def quantized(name: str, weights: torch.Tensor, stored: GroupFormat) -> torch.Tensor:
    """Return `weights` [..., inner] of tensor `name` in format `stored`, as uint8 [..., bytes of a row].

    Raises:
        WeightsError: `weights` contain NaN or infinity.
    """
    if not all(bound.isfinite() for bound in torch.aminmax(weights)):
        raise WeightsError(f"{name} holds nan or infinity: the file is damaged; download it again")
    return quantize(weights, stored)
