"""Which family serves which architecture. The names here and in the contract's `FAMILY_DEFAULTS` are the same."""

from __future__ import annotations

from typing import Final

from stoker_engine.models.family import Family
from stoker_engine.models.gemma3 import GEMMA3
from stoker_engine.models.llama import LLAMA

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": LLAMA,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
}
