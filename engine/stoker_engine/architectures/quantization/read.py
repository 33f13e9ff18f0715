"""Parse config.json's ``quantization_config``, by its quantization method."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.stated import stated_quantization

#: Parser of a config.json that has a ``quantization_config``; raises ModelError.
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

#: Supported quantization methods, by their names in config.json.
METHODS: Final = tuple(_METHODS)


def read_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return how a checkpoint's weights are quantized, or None if they are not.

    Args:
        config: parsed config.json of the checkpoint.

    Raises:
        ModelError: the method or its settings are not supported.
    """
    stated = stated_quantization(config)
    if stated is None:
        return None
    method = stated["quant_method"]
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"the checkpoint is quantized by {reprlib.repr(method)}, which is not supported; "
            f"use one by {', '.join(METHODS)}, or the unquantized model with --quantization"
        )
    return _METHODS[method]({**config, "quantization_config": stated})


def kv_cache_of(config: Mapping[str, Any]) -> str:
    """Return the format that a checkpoint's KV-cache scales are for: ``fp8`` (e4m3, symmetric), the description of
    another format, or an empty string if config.json does not state one."""
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
