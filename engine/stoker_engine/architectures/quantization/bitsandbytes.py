"""bitsandbytes: LLM.int8() (Dettmers et al., 2022) and QLoRA's nf4 (Dettmers et al., 2023); fields are
those of transformers' ``BitsAndBytesConfig``.

With 8 bits, each row has a scale. With 4 bits, each block of 64 elements of the flattened matrix has a scale. If blocks
cross the ends of rows, rows are split into smaller groups, each within one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.listed_modules import ListedModules, class_of, is_head
from stoker_engine.architectures.stored_formats import GroupFormat

METHOD: Final = "bitsandbytes"

#: Elements per 4-bit block, unless the checkpoint's tensors state another number.
BLOCK: Final = 64

_FIELD: Final = "config.json: quantization_config"


@dataclass(frozen=True)
class BitsAndBytes:
    """See `QuantizationConfig`.

    Attributes:
        bits: 8 or 4.
        unquantized: modules that are not quantized, in addition to embeddings.
        head: whether the language-model head is quantized, unless `unquantized` lists it.
    """

    bits: int
    unquantized: ListedModules
    head: bool = True
    method: str = METHOD

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        if class_of(module) == "Embedding" or self.unquantized.mean(module) or (is_head(module) and not self.head):
            return None
        if self.bits == 8:
            return GroupFormat("int8", 0, "float32")
        format = nf4_format(inner, BLOCK)
        if format is None:
            raise ModelError(f"{module} has rows of {inner} values, {unfit(BLOCK)}")
        return format

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        return 1


def nf4_format(inner: int, block: int) -> GroupFormat | None:
    """Return the format of rows of `inner` elements in blocks of `block` elements, which may cross the ends of rows.
    Return None if the group size would not be a multiple of 16."""
    group = math.gcd(inner, block)
    if group % 16:
        return None
    return GroupFormat("nf4", group if group < inner else 0, "float32")


def unfit(block: int) -> str:
    """Return why `nf4_format` returned None, as the end of a sentence."""
    return (
        f"which blocks of {block} split into groups that are not a multiple of 16; quantize the model again to 8 bits "
        "(load_in_8bit)"
    )


def parse(config: Mapping[str, Any]) -> BitsAndBytes:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    stated = Fields(config, {}).object("quantization_config")
    names = {"load_in_8bit": "_load_in_8bit", "load_in_4bit": "_load_in_4bit"}
    fields = Fields(stated, {"bnb_4bit_quant_type": "fp4"}, names, file=_FIELD)
    eight, four = fields.flag("load_in_8bit"), fields.flag("load_in_4bit")
    if eight == four:
        raise ModelError(f"{_FIELD} must set either load_in_8bit or load_in_4bit")
    kind = fields.text("bnb_4bit_quant_type")
    if four and kind != "nf4":
        raise ModelError(
            f"{_FIELD}: bnb_4bit_quant_type {kind!r} is not supported; quantize the model again to nf4 or 8 bits"
        )
    # Without a list, transformers does not quantize the head.
    listed = fields.get("llm_int8_skip_modules") is not None
    unquantized = ListedModules.of(
        fields.items("llm_int8_skip_modules", str), "quantization_config's llm_int8_skip_modules"
    )
    return BitsAndBytes(8 if eight else 4, unquantized, head=listed)
