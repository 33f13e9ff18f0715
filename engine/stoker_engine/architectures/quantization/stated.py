"""Quantization method that a config.json states; used by the planner and the engine.

    quantization_config                        nearly all checkpoints
    text_config: {quantization_config: …}      some multimodal models (Kimi-K2.5)

Model Optimizer does not always write ``quant_method``, and some releases name NVFP4 ``modelopt``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures.text_config import text_of


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a parsed config.json, with a ``quant_method`` added if it is missing; None
    if there is no ``quantization_config``.

    Raises:
        ModelError: ``quantization_config`` is not an object.
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
    """Return a parsed config.json without ``quantization_config``."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    text = text_of(plain)
    if text is plain or "quantization_config" not in text:
        return plain
    return {name: without_quantization(value) if value is text else value for name, value in plain.items()}


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return the ``quant_method`` of a parsed config.json; empty if its weights are not quantized."""
    stated = stated_quantization(config)
    return "" if stated is None else str(stated["quant_method"])


def _is_modelopt(stated: Mapping[str, Any]) -> bool:
    """Whether Model Optimizer wrote the config: it is the stated producer, or the config has ``quant_algo``."""
    producer = stated.get("producer")
    inner = stated.get("quantization")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return named or "quant_algo" in stated or (isinstance(inner, Mapping) and "quant_algo" in inner)
