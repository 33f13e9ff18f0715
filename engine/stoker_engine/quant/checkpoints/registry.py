"""Which file finds the matrices of which method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.quant.checkpoints.module import StoredModule, Tensors

#: A checkpoint's quantized matrices, by the names of their modules.
FindModules = Callable[[QuantizationConfig, Tensors], dict[str, StoredModule]]

#: By `QuantizationConfig.method`.
FIND_MODULES: Final[dict[str, FindModules]] = {}
