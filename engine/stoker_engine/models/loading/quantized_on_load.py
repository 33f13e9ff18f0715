"""A checkpoint of numbers whose matrices are quantized while they are loaded (``--quantization int8``)."""

from __future__ import annotations

import torch

from stoker_common.errors import ArgumentError, WeightsError
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.models.loading.weight_source import Part, WeightSource, check_shape
from stoker_engine.quant.weight_target import WeightTarget
from stoker_engine.sizing.quantized_weights import canonical_method


def format_on_load(requested: str | None, stated: str | None) -> GroupFormat | None:
    """What matrices are quantized into when they are loaded; None: they stay as they are.

    Args:
        requested: ``--quantization``.
        stated: by what the checkpoint is quantized; None: by nothing.

    Raises:
        ArgumentError: it is quantized otherwise, or what is asked for is nothing that is done when loading.
    """
    if requested is None or (stated is not None and canonical_method(requested) == canonical_method(stated)):
        return None
    if stated is not None:
        raise ArgumentError(
            "--quantization",
            f"{requested} is asked for, and the checkpoint is quantized by {stated} already; leave it out",
        )
    if requested not in ON_LOAD:
        raise ArgumentError(
            "--quantization",
            f"{requested} is asked for, and the checkpoint is not quantized; when it is loaded it can be, to "
            f"{', '.join(ON_LOAD)}",
        )
    return ON_LOAD[requested]


class QuantizedOnLoad:
    """A `WeightSource` whose tensors can be read in groups that share a scale, each number rounded to the nearest.

    Args:
        numbers: where they come from. Only what is asked for is read, and nothing is kept.
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
        """See `WeightSource`: as it is in the files."""
        return self._numbers.stored(name)

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`; rows are cut between groups.

        Raises:
            WeightsError: there is nan or infinity to be quantized.
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
    """`weights` [..., inner] of the tensor called `name` in `stored`: uint8 [..., bytes of a row].

    Raises:
        WeightsError: nan or infinity is among them.
    """
    if not all(bound.isfinite() for bound in torch.aminmax(weights)):
        raise WeightsError(f"{name} holds nan or infinity: the file is damaged; fetch it again")
    return quantize(weights, stored)
