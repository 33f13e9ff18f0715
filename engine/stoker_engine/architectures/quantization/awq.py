"""AWQ (Lin et al., 2023), as AutoAWQ and GPTQModel write it; fields are AutoAWQ's and those of
transformers' ``AwqConfig``.

AutoAWQ has a weight layout for each of several kernels (``version``); nearly all checkpoints have ``gemm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.gptq import group_size
from stoker_engine.architectures.quantization.listed_modules import is_head, is_usually_numbers
from stoker_engine.architectures.stored_formats import GroupFormat, Scale

METHOD: Final = "awq"

_FIELD: Final = "config.json: quantization_config"
_NAMES: Final = {"bits": "w_bit", "group_size": "q_group_size", "format": "version"}


@dataclass(frozen=True)
class AWQ:
    """See `QuantizationConfig`.

    Attributes:
        group: elements of a row per scale; -1: the whole row.
        zero: whether groups have zero points; otherwise the zero point is half of the codes' range.
        unquantized: modules whose names contain one of these are not quantized.
        head: whether the language-model head is quantized.
    """

    group: int
    zero: bool
    unquantized: tuple[str, ...] = ()
    head: bool = False
    method: str = METHOD

    def format(self, inner: int, scale: Scale = "float16") -> GroupFormat:
        """Return the format of rows of `inner` elements, with scales of dtype `scale`."""
        return GroupFormat("uint4", self.group if 0 < self.group < inner else 0, scale, self.zero)

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        named = any(part in module for part in self.unquantized)
        quantized = self.head if is_head(module) else not is_usually_numbers(module)
        return self.format(inner) if quantized and not named else None

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return 1


def parse(config: Mapping[str, Any]) -> AWQ:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    stated = Fields(config, {}).object("quantization_config")
    fields = Fields(stated, {"bits": 4, "group_size": 128, "format": "gemm"}, _NAMES, file=_FIELD)
    version = fields.text("format")
    if fields.get("backend") == "llm-awq":
        version = "llm-awq"
    if version.lower() != "gemm":
        raise ModelError(
            f"{_FIELD}: AWQ's format {version!r} is not supported; quantize the model again with AutoAWQ, version gemm"
        )
    if fields.integer("bits") != 4:
        raise ModelError(
            f"{_FIELD}: AWQ with {fields.integer('bits')} bits is not supported; quantize the model again with 4"
        )
    zero = fields.flag("zero_point") if fields.get("zero_point") is not None else not fields.flag("sym")
    return AWQ(group_size(fields), zero, tuple(fields.items("modules_to_not_convert", str)), fields.flag("lm_head"))
