"""config.json's ``quantization_config``, by the method that it names."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.stated import stated_quantization

#: A parsed config.json with a ``quantization_config`` → what it says; raises ModelError.
Read = Callable[[Mapping[str, Any]], QuantizationConfig]

_METHODS: Final[dict[str, Read]] = {
    "awq": awq.parse,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fbgemm_fp8": fp8.parse,
    "fp8": fp8.parse,
    "gptq": gptq.parse,
    "modelopt": modelopt.parse,
    "modelopt_fp4": modelopt.parse,
    "modelopt_mxfp8": modelopt.parse,
    "mxfp4": mxfp4.parse,
    "mxfp8": fp8.parse,
}

#: The methods whose checkpoints are read, by their names in config.json.
METHODS: Final = tuple(_METHODS)


def read_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """How a checkpoint's weights are quantized; None: they are not.

    Args:
        config: its parsed config.json.

    Raises:
        ModelError: by a method, or in a way, that is not computed here.
    """
    stated = stated_quantization(config)
    if stated is None:
        return None
    method = stated["quant_method"]
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"the checkpoint is quantized by {reprlib.repr(method)}, which is not computed here; "
            f"use one by {', '.join(METHODS)}, or the unquantized model with --quantization"
        )
    return _METHODS[method]({**config, "quantization_config": stated})


def kv_cache_of(config: Mapping[str, Any]) -> str:
    """What a checkpoint's scales of keys and values are made for: ``fp8`` (e4m3, symmetric), or another kind's
    description; empty: config.json does not say."""
    stated = stated_quantization(config)
    if stated is None:
        return ""
    inner = stated.get("quantization")
    found = {**stated, **inner} if isinstance(inner, Mapping) else stated
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if not isinstance(scheme, Mapping):
        return "" if not scheme else str(scheme)[:100].lower()
    kind = scheme.get("type", "float"), scheme.get("num_bits", 8), scheme.get("symmetric", True)
    return "fp8" if kind == ("float", 8, True) else reprlib.repr(dict(scheme))
