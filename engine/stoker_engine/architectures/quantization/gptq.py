"""GPTQ (Frantar et al., 2022), as AutoGPTQ, GPTQModel and optimum write it; fields are those of GPTQModel.

With ``desc_act``, a group consists of columns that were quantized in succession, which need not be adjacent in the
matrix. If ``static_groups`` is also set, the columns of a group are adjacent. Files state the group of each column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.listed_modules import ListedModules, is_head, is_usually_numbers
from stoker_engine.architectures.stored_formats import Code, GroupFormat, Scale

METHOD: Final = "gptq"

_CODES: Final[dict[int, Code]] = {2: "uint2", 3: "uint3", 4: "uint4", 8: "uint8"}
_FIELD: Final = "config.json: quantization_config"
_AGAIN: Final = "quantize the model again with GPTQModel, format gptq or gptq_v2"


@dataclass(frozen=True)
class Settings:
    """Storage of a module's matrix.

    Attributes:
        bits: bits per element.
        group: elements of a row per scale; -1: the whole row.
        symmetric: whether all zero points are half of the codes' range.
        act_order: whether the columns of a group need not be adjacent.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool

    def format(self, inner: int, scale: Scale = "float16", ordered: bool = True) -> GroupFormat:
        """Return the format of rows of `inner` elements.

        Args:
            scale: dtype of the scales.
            ordered: whether the columns of each group are adjacent.
        """
        group = self.group if 0 < self.group < inner else 0
        order: Literal["columns", "groups"] = "columns" if ordered or not group else "groups"
        return GroupFormat(_CODES[self.bits], group, scale, not self.symmetric, in_order_of=order)


@dataclass(frozen=True)
class GPTQ:
    """See `QuantizationConfig`.

    Attributes:
        settings: settings of modules without an override.
        named: patterns of modules with an override; the first match is used.
        overrides: settings for each pattern of `named`; None: not quantized.
        parts: the name of a quantized module, except the head, contains one of these; empty: any name.
        head: whether the language-model head is quantized.
        zeros_less_one: whether stored zero points are smaller by 1, as in the first version of the format.
        zeros_by_word: whether the 1 was subtracted from packed words, so that a zero point of 0 borrows from the next
            element.
    """

    settings: Settings
    named: ListedModules = field(default_factory=ListedModules)
    overrides: tuple[Settings | None, ...] = ()
    parts: tuple[str, ...] = ()
    head: bool = False
    zeros_less_one: bool = True
    zeros_by_word: bool = False
    method: str = METHOD

    def settings_of(self, module: str) -> Settings | None:
        """Return the settings of a module that is quantized by default; None if an override excludes it."""
        index = self.named.first(module)
        return self.settings if index is None else self.overrides[index]

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        if is_head(module):
            quantized = self.head
        else:
            named = not self.parts or any(part in module for part in self.parts)
            quantized = named and not is_usually_numbers(module)
        settings = self.settings_of(module) if quantized else None
        return None if settings is None else settings.format(inner, ordered=not settings.act_order)

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return 1


def parse(config: Mapping[str, Any]) -> GPTQ:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    stated = Fields(config, {}).object("quantization_config")
    fields = Fields(stated, {"format": METHOD}, {"format": "checkpoint_format"}, file=_FIELD)
    version = fields.text("format")
    if fields.flag("is_marlin_format"):
        version = "marlin"
    if version.lower() not in ("gptq", "gptq_v2"):
        raise ModelError(f"{_FIELD}: GPTQ's format {version!r} is not supported; {_AGAIN}")
    words = fields.get("pack_dtype") or "int32"
    if words not in ("int32", "torch.int32"):
        raise ModelError(f"{_FIELD}: pack_dtype {words!r:.50} is not supported; {_AGAIN} and pack_dtype int32")
    settings = _settings(fields, Settings(0, 128, True, False))
    quantizers = fields.object("meta").get("quantizer")
    dynamic = fields.object("dynamic")
    patterns = ["re:" + re.sub(r"^[+-]:", "", pattern) for pattern in dynamic]
    return GPTQ(
        settings,
        ListedModules.of(patterns, "quantization_config's dynamic"),
        tuple(_override(pattern, override, settings) for pattern, override in dynamic.items()),
        tuple(_words(fields.get("modules_in_block_to_quantize"))),
        fields.flag("lm_head"),
        version.lower() == "gptq",
        any(word.startswith("gptqmodel:") for word in _words(quantizers)),
    )


def group_size(fields: Fields) -> int:
    """Return the number of elements of a row per scale; -1: the whole row.

    Raises:
        ModelError: the group size is not supported.
    """
    group = fields.integer("group_size", -1)
    if group == 0 or (group > 0 and group % 16):
        raise ModelError(
            f"{_FIELD}: a group_size of {group} is not supported; quantize the model again with -1 or a multiple of 16"
        )
    return group


def _override(pattern: str, stated: Any, settings: Settings) -> Settings | None:
    """Return the settings of an entry of ``dynamic``; None for ``-:pattern``, whose modules are not quantized."""
    if pattern.startswith("-:"):
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"{_FIELD}: dynamic must hold an object for each pattern, not {stated!r:.50}")
    return _settings(Fields(stated, {}, file=f"{_FIELD}: dynamic"), settings)


def _settings(fields: Fields, otherwise: Settings) -> Settings:
    """Return the settings in `fields`, with the defaults `otherwise`; a default of 0 `bits` means required."""
    bits = otherwise.bits if otherwise.bits and fields.get("bits") is None else fields.integer("bits")
    if bits not in _CODES:
        raise ModelError(
            f"{_FIELD}: GPTQ with {bits} bits is not supported; quantize the model again with 2, 3, 4 or 8"
        )
    group = otherwise.group if fields.get("group_size") is None else group_size(fields)
    flags = {
        name: fields.flag(field)
        for name, field in (("symmetric", "sym"), ("act_order", "desc_act"))
        if fields.get(field) is not None
    }
    if fields.flag("static_groups"):
        flags["act_order"] = False
    return replace(otherwise, bits=bits, group=group, **flags)


def _words(listed: Any) -> list[str]:
    """Return all strings in a string or a nested list; values of other types are ignored."""
    if isinstance(listed, str):
        return [listed]
    return [word for each in listed for word in _words(each)] if isinstance(listed, list) else []
