"""config.json's ``quantization_config``, by the method that it names."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_engine.architectures.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.contract.errors import ModelError

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
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"config.json's quantization_config is {reprlib.repr(stated)}, not an object")
    method = stated.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"the checkpoint is quantized by {reprlib.repr(method)}, which is not computed here; "
            f"use one by {', '.join(METHODS)}, or the unquantized model with --quantization"
        )
    return _METHODS[method](config)
