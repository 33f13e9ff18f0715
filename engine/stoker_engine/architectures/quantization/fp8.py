"""FP8 weights with a scale for each tensor, row or block: ``fp8`` (AutoFP8's and DeepSeek's), ``fbgemm_fp8``, and
``mxfp8``, whose blocks are 32 elements of a row.

With e4m3 weights whose scales are not powers of two, activations are quantized, too, for each token or group of
columns, on GPUs with FP8 tensor cores; scales stored for activations are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.listed_modules import ListedModules, is_usually_numbers
from stoker_engine.architectures.stored_formats import LARGEST_GROUP, Code, GroupFormat, Scale


@dataclass(frozen=True)
class FP8:
    """See `QuantizationConfig`.

    Attributes:
        format: format of the matrices in memory, where each row has its own scales.
        rows: rows per scale in the files: those of a block, 1, or 0 for all rows of a tensor. The loader follows the
            tensors, which may differ from config.json.
        ignored: modules that are not quantized.
        activations: description of the activations' quantization; empty if there is none.
    """

    method: str
    format: GroupFormat
    rows: int
    ignored: ListedModules
    activations: str

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        return None if is_usually_numbers(module) or self.ignored.name(module) else self.format.for_rows(inner)

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return self.rows


def parse(config: Mapping[str, Any]) -> FP8:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    given = Fields(config, {}).object("quantization_config")
    fields = Fields(given, {"activation_scheme": "dynamic"}, file="config.json: quantization_config")
    method = fields.text("quant_method")
    if (experts := fields.get("expert_dtype")) not in (None, "fp8"):
        raise ModelError(
            f"config.json: quantization_config has experts of {str(experts)[:20]} in an fp8 checkpoint, which is "
            "not supported; use a checkpoint whose experts are fp8"
        )
    rows, group = (1, 32) if method == "mxfp8" else _block(fields, 1 if method == "fbgemm_fp8" else 0)
    bytes_only = method == "mxfp8" or (fields.get("scale_fmt") == "ue8m0" and (rows, group) == (1, 32))
    scale: Scale = "e8m0" if bytes_only else "float32"
    ignored = [*fields.items("modules_to_not_convert", str), *fields.items("ignored_layers", str)]
    scheme = fields.text("activation_scheme").lower()
    if scheme not in ("static", "dynamic"):
        raise ModelError(
            f"config.json: quantization_config has the activation_scheme {scheme[:20]!r}; it must be static or dynamic"
        )
    code: Code = "fp8_e5m2" if fields.get("fmt") == "e5m2" else "fp8_e4m3"
    return FP8(
        method,
        GroupFormat(code, group, scale, quantized_activations=code == "fp8_e4m3" and not bytes_only),
        rows,
        ListedModules.of(ignored, "quantization_config's modules_to_not_convert"),
        "fp8 by stored scales" if scheme == "static" else "fp8 for each token",
    )


def _block(fields: Fields, rows: int) -> tuple[int, int]:
    """Return the rows and columns of a block; `rows` and 0 if there are no blocks."""
    size = fields.items("weight_block_size", int)
    if not size:
        return rows, 0
    if len(size) != 2 or min(size) < 1 or max(size) > LARGEST_GROUP or size[1] % 16:
        raise ModelError(
            f"config.json: quantization_config has the weight_block_size {size[:4]}; it must be [rows, "
            "columns] with columns a multiple of 16, for example [128, 128]"
        )
    return size[0], size[1]
