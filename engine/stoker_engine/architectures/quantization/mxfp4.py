"""MXFP4 experts, as gpt-oss has them: 32 numbers of 4 bits share a power of two (OCP's Microscaling formats, 2023)."""

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
        ignored: modules that are stored as numbers; those that are no experts are anyhow.
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
    """What a parsed config.json says in its ``quantization_config``.

    Raises:
        ModelError: something that cannot be.
    """
    given = Fields(config, {}).object("quantization_config")
    names = Fields(given, {}, file="config.json: quantization_config").items("modules_to_not_convert", str)
    return MXFP4(ListedModules.of(names, "quantization_config's modules_to_not_convert"))
