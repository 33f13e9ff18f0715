"""Quantization schemes of compressed-tensors that need no calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from stoker_common.errors import ArgumentError


@dataclass(frozen=True)
class Scheme:
    """Format in which a checkpoint's matrices are stored.

    Attributes:
        format: compressed-tensors' name of the layout.
        bits: bits of a code.
        type: "int", or "float" for FP8 (e4m3).
        group_size: number of consecutive elements of a row that share a scale; 0: the whole row.
        symmetric: whether groups have no zero points.
        activations: whether config.json requests that engines also quantize activations, to the same type with a
            dynamic scale for each token.
    """

    format: Literal["pack-quantized", "int-quantized", "float-quantized"]
    bits: int
    type: Literal["int", "float"]
    group_size: int = 0
    symmetric: bool = True
    activations: bool = False

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return config.json's ``quantization_config``.

        Args:
            ignore: names of linear modules that are not quantized.
        """
        shared = {"num_bits": self.bits, "type": self.type}
        weights = {
            **shared,
            "symmetric": self.symmetric,
            "group_size": self.group_size or None,
            "strategy": "group" if self.group_size else "channel",
            "dynamic": False,
        }
        activations = {**shared, "symmetric": True, "group_size": None, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if self.activations else None,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
        }


SCHEMES: Final = {
    "W4A16": Scheme("pack-quantized", 4, "int", 128),
    "W4A16_ASYM": Scheme("pack-quantized", 4, "int", 128, symmetric=False),
    "W8A16": Scheme("pack-quantized", 8, "int", 128),
    "W8A8": Scheme("int-quantized", 8, "int", activations=True),
    "FP8_DYNAMIC": Scheme("float-quantized", 8, "float", activations=True),
}


def with_group_size(scheme: Scheme, group_size: int | None) -> Scheme:
    """Return `scheme` with `group_size`, if one is given.

    Raises:
        ArgumentError: the scheme has no groups, or the size is invalid.
    """
    if group_size is None:
        return scheme
    if not scheme.group_size:
        raise ArgumentError("--group-size", "this format has one scale for each row; leave it out")
    if group_size < 16 or group_size % 16:
        raise ArgumentError("--group-size", f"must be a multiple of 16, such as 32, 64 or 128, got {group_size}")
    return replace(scheme, group_size=group_size)
