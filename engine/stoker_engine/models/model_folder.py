"""What the small files of a Hugging Face folder state about its model. Does not import torch: the server checks them
before it starts an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.architectures.no_decoder import NAME_ONE, NO_ARCHITECTURES, why_no_decoder
from stoker_engine.architectures.own_modules import own_modules, why_not_quantized
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.models.loading.weight_files import refuse_other_formats, weight_files
from stoker_engine.sizing.method_on_load import method_on_load
from stoker_engine.sizing.planned_formats import refuse_transposed


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model that can be loaded, as far as can be seen without its weights.

    Attributes:
        raw_config: parsed config.json, completed from other files.
        config: shape of the model; None: only the Transformers backend knows the architecture.
        quantization: how the weights are quantized; None: they are not, or `config` is None.
        on_load: method by which matrices are quantized while loading; None: they keep their format.
    """

    path: Path
    raw_config: Mapping[str, Any]
    config: ModelConfig | None
    quantization: QuantizationConfig | None = None
    on_load: str | None = None


def read_folder(path: Path, quantization: str | None) -> ModelFolder:
    """Read a folder.

    Args:
        quantization: value of ``--quantization``.

    Raises:
        ModelError: the model is not supported, or files are missing or invalid.
        ArgumentError: the checkpoint does not support `quantization`.
    """
    raw_config = read_config(path)
    architectures = Fields(raw_config, {}).items("architectures", str)
    if not architectures:
        raise ModelError(f"{path}/{NO_ARCHITECTURES}; {NAME_ONE}")
    if names := own_modules(raw_config):
        if reason := why_no_decoder(raw_config):
            raise ModelError(f"architecture {', '.join(architectures)} is not supported: {reason}")
        if quantization is not None:
            raise ArgumentError("--quantization", f"{why_not_quantized(names)}; leave it out")
        _check_files(path)
        return ModelFolder(path, raw_config, None)
    stored = read_quantization(raw_config)
    on_load = method_on_load(quantization, stored.method if stored else None)
    config = ModelConfig.from_dict(raw_config)
    _check_files(path)
    if stored is not None:
        refuse_transposed(config.architecture, stored.method)
    return ModelFolder(path, raw_config, config, stored, on_load)


def _check_files(folder: Path) -> None:
    refuse_other_formats(folder)
    weight_files(folder)
