"""Quantization of an unquantized checkpoint while it is loaded, for example by ``--quantization int8``."""

from __future__ import annotations

from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.models.loading.weight_source import Part, WeightSource, check_shape
from stoker_engine.quant.weight_target import WeightTarget


class QuantizedOnLoad:
    """A `WeightSource` that quantizes matrices as they are read, in groups that share a scale, rounding to nearest.

    Args:
        numbers: source of the unquantized weights. Each read quantizes again: results are not cached.
        device: where matrices are quantized; the results are there, too. Their bits are the same on every device.
    """

    def __init__(self, numbers: WeightSource, device: torch.device) -> None:
        self._numbers, self._device = numbers, device

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
            return quantized(name, self._numbers.read(name, part), stored, self._device)
        return self._numbers.read(name, part, stored)

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`."""
        if isinstance(target.stored, GroupFormat):
            check_shape(name, self.shape(name), target)
            target.tensor.copy_(self.read(name, target.shard, target.stored))
        else:
            self._numbers.read_into(name, target)


#: Number of elements that are copied to a device and quantized at a time, which limits temporary memory to about 100
#: MB: several float32 values for each element.
_ELEMENTS: Final = 1 << 22


def quantized(name: str, weights: torch.Tensor, stored: GroupFormat, device: torch.device) -> torch.Tensor:
    """Return `weights` [..., inner] of tensor `name` in format `stored`, as uint8 [..., bytes of a row] on `device`,
    where they are quantized some rows at a time.

    Raises:
        WeightsError: `weights` contain NaN or infinity.
    """
    inner = weights.shape[-1]
    rows = weights.reshape(-1, inner)
    out = torch.empty(len(rows), stored.row_bytes(inner), dtype=torch.uint8, device=device)
    step = max(1, _ELEMENTS // max(1, inner))
    for start in range(0, len(rows), step):
        some = rows[start : start + step].to(device)
        if not all(bound.isfinite() for bound in torch.aminmax(some)):
            raise WeightsError(f"{name} holds nan or infinity: the file is damaged; download it again")
        out[start : start + step] = quantize(some, stored)
    return out.view(*weights.shape[:-1], out.shape[1])
