"""Finds where a config.json states its quantization method, and the name of that method; planner and engine share it.

    quantization_config                        nearly all checkpoints
    text_config: {quantization_config: …}      models that also read images (Kimi-K2.5)

Model Optimizer does not always say ``quant_method``, and calls NVFP4 ``modelopt`` in some releases.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures.text_config import text_of


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a parsed config.json says of its quantization, always with a ``quant_method``; None: it says nothing.

    Raises:
        ModelError: what it says is no object.
    """
    stated = config.get("quantization_config") or text_of(config).get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"config.json's quantization_config is {reprlib.repr(stated)}, not an object")
    if stated.get("quant_method"):
        return stated
    return {**stated, "quant_method": "modelopt" if _is_modelopt(stated) else "unknown"}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json that says nothing of it."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    text = text_of(plain)
    if text is plain or "quantization_config" not in text:
        return plain
    return {name: without_quantization(value) if value is text else value for name, value in plain.items()}


def quantization_method(config: Mapping[str, Any]) -> str:
    """The method that a parsed config.json states, in its own words; empty: its weights are not quantized."""
    stated = stated_quantization(config)
    return "" if stated is None else str(stated["quant_method"])


def _is_modelopt(stated: Mapping[str, Any]) -> bool:
    """Whether Model Optimizer wrote it: it names itself, or an algorithm as only it does."""
    producer = stated.get("producer")
    inner = stated.get("quantization")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return named or "quant_algo" in stated or (isinstance(inner, Mapping) and "quant_algo" in inner)
