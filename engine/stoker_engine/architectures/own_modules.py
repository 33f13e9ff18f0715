"""Architectures that only the Transformers backend runs, which does not load quantized weights.

The engine rejects their quantized checkpoints at startup, and the planner before a pod is created.
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
    """Return the architectures of a parsed config.json, separated by commas; empty if there are none, or one is in
    `FAMILIES`.

    Raises:
        ModelError: ``architectures`` is not a list of names.
    """
    names = Fields(config, {}).items("architectures", str)
    return "" if any(name in FAMILIES for name in names) else ", ".join(names)


def why_not_loaded(config: Mapping[str, Any]) -> str:
    """Return why the Transformers backend cannot load the checkpoint, or an empty string if its weights are not
    quantized.

    Raises:
        ModelError: ``quantization_config`` is not an object.
    """
    method = quantization_method(config)
    return method and (
        f"the checkpoint is quantized ({method}), and its architecture runs on the Transformers backend, which "
        "does not load quantized weights"
    )


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Reject the config.json of a quantized checkpoint.

    Raises:
        ModelError: the checkpoint is quantized.
    """
    if why := why_not_loaded(config):
        raise ModelError(f"{why}; {UNQUANTIZED_ONE}")


def why_not_quantized(architectures: str) -> str:
    """Return why ``--quantization`` is not supported for these architectures."""
    return f"{architectures} runs on the Transformers backend, which does not quantize weights"
