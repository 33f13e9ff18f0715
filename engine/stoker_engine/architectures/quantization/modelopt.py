"""NVIDIA's Model Optimizer: FP8 with a scale per tensor, row or block, MXFP8, and NVFP4.

Activations of the first two kinds of FP8 are quantized for each token, on GPUs with FP8 tensor cores; scales stored for
them are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.fp8 import FP8
from stoker_engine.architectures.quantization.listed_modules import ListedModules, is_usually_numbers
from stoker_engine.architectures.stored_formats import GroupFormat

#: NVFP4: one scale per 16 elements, and another for the whole tensor.
_NVFP4: Final = GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True)

#: ``quant_algo`` of the FP8 kinds → format and rows per scale (0: all).
_FP8: Final = {
    "FP8": (GroupFormat("fp8_e4m3", 0, "float32", quantized_activations=True), 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (GroupFormat("fp8_e4m3", 0, "float32", quantized_activations=True), 1),
    "FP8_PB_WO": (GroupFormat("fp8_e4m3", 128, "float32"), 128),
    "MXFP8": (GroupFormat("fp8_e4m3", 32, "e8m0"), 1),
}


@dataclass(frozen=True)
class NVFP4:
    """See `QuantizationConfig`.

    Attributes:
        ignored: modules that are not quantized.
    """

    ignored: ListedModules
    format: GroupFormat = _NVFP4
    activations: str = "fp4 for each token"
    method: str = "modelopt_fp4"

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        return None if is_usually_numbers(module) or self.ignored.name(module) else self.format

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return 1


def parse(config: Mapping[str, Any]) -> FP8 | NVFP4:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    given = Fields(config, {}).object("quantization_config")
    fields = Fields(given, {}, file="config.json: quantization_config")
    inner = fields.object("quantization")
    fields = Fields(inner, {}, file="config.json: quantization_config.quantization") if inner else fields
    algorithm = fields.text("quant_algo").upper()
    ignored = ListedModules.of(
        [*fields.items("ignore", str), *fields.items("exclude_modules", str)], "quantization_config's exclude_modules"
    )
    if algorithm == "NVFP4":
        if fields.get("group_size") not in (None, 16):
            raise ModelError("config.json: quantization_config must have a group_size of 16 for NVFP4")
        return NVFP4(ignored)
    if algorithm not in _FP8:
        raise ModelError(
            f"config.json: quantization_config has the quant_algo {algorithm[:40]!r}, which is not supported; "
            f"supported are {', '.join(_FP8)} and NVFP4; export the model again as one of them"
        )
    format, rows = _FP8[algorithm]
    activations = "" if algorithm == "FP8_PB_WO" else "fp8 by stored scales" if algorithm == "FP8" else "fp8"
    method = "modelopt_mxfp8" if algorithm == "MXFP8" else "modelopt"
    return FP8(method, format, rows, ignored, activations)
