"""Architectures that no family here describes: transformers' own modules run them, and are given no quantized weights.

The engine refuses them at its start, and the planner before there is a pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.quantization.stated import quantization_method

UNQUANTIZED_ONE = "use the unquantized model"


def own_modules(config: Mapping[str, Any]) -> str:
    """The architectures that a parsed config.json names, where transformers' own modules run them; empty: a family here
    describes one of them, or it names none.

    Raises:
        ModelError: its ``architectures`` are no list of names.
    """
    names = Fields(config, {}).items("architectures", str)
    return "" if any(name in FAMILIES for name in names) else ", ".join(names)


def why_not_loaded(config: Mapping[str, Any]) -> str:
    """Why the checkpoint of such an architecture is not loaded: it is quantized; empty: it is not.

    Raises:
        ModelError: what the config says of its quantization is no object.
    """
    method = quantization_method(config)
    return method and (
        f"the checkpoint is quantized ({method}), and its architecture runs by transformers' own modules, which are "
        "given no quantized weights here"
    )


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Refuses a config of quantized weights.

    Raises:
        ModelError: it is one.
    """
    if why := why_not_loaded(config):
        raise ModelError(f"{why}; {UNQUANTIZED_ONE}")


def why_not_quantized(architectures: str) -> str:
    """Why such architectures are not quantized when they are loaded, either (``--quantization``)."""
    return f"{architectures} runs by transformers' own modules, which are not quantized here"
