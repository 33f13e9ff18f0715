"""MXFP4 experts, as in gpt-oss: 32 4-bit elements share a power of two (OCP's Microscaling formats, 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.listed_modules import ListedModules
from stoker_engine.architectures.stored_formats import GroupFormat

_EXPERTS: Final = "experts"
_FORMAT: Final = GroupFormat("fp4", 32, "e8m0")


@dataclass(frozen=True)
class MXFP4:
    """See `QuantizationConfig`.

    Attributes:
        ignored: experts that are not quantized; other modules are never quantized.
    """

    ignored: ListedModules
    format: GroupFormat = _FORMAT
    method: str = "mxfp4"

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        return self.format if _EXPERTS in module.split(".") and not self.ignored.name(module) else None

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return 1


def parse(config: Mapping[str, Any]) -> MXFP4:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: a field has the wrong type, or a pattern is not supported.
    """
    given = Fields(config, {}).object("quantization_config")
    names = Fields(given, {}, file="config.json: quantization_config").items("modules_to_not_convert", str)
    return MXFP4(ListedModules.of(names, "quantization_config's modules_to_not_convert"))
