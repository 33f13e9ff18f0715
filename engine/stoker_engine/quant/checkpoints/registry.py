"""Registry of quantization methods: the function that finds the matrices of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_engine.quant.checkpoints import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from stoker_engine.quant.checkpoints.module import StoredModule, Tensors

#: (quantization config of the method, tensors) → quantized matrices by module name.
FindModules = Callable[[Any, Tensors], Mapping[str, StoredModule]]

#: The function for each value of `QuantizationConfig.method`.
FIND_MODULES: Final[dict[str, FindModules]] = {
    "awq": awq.find_modules,
    "bitsandbytes": bitsandbytes.find_modules,
    "compressed-tensors": compressed_tensors.find_modules,
    "fbgemm_fp8": fp8.find_modules,
    "fp8": fp8.find_modules,
    "gptq": gptq.find_modules,
    "modelopt": modelopt.find_modules,
    "modelopt_fp4": modelopt.find_modules,
    "modelopt_mxfp8": modelopt.find_modules,
    "mxfp4": mxfp4.find_modules,
    "mxfp8": fp8.find_modules,
}
