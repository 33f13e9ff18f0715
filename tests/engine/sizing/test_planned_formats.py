"""What the planner foresees of a quantized model is what the engine finds in its files, weight by weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.quantization.read import METHODS, read_quantization
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sizing.planned_formats import on_load_formats, stated_formats
from stoker_engine.sizing.quantized_weights import canonical_method
from stoker_engine.sizing.weight_formats import ALL_NUMBERS
from stoker_engine.sizing.weight_sizes import matrices, weight_bytes

from ..models import gguf_models
from ..quant.test_quantized_models import Pair
from ..quant.test_quantized_models import pair_of as pair_of

CPU = torch.device("cpu")
CATALOGUE = Path(__file__).parents[3] / "operator/stoker_operator/plan/catalogue.yaml"


def _config(folder: Path) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "W4A16 asymmetric"),
        ("llama tied", "embedding and head"),
        ("qwen2", "W8A8"),
        ("phi3", "FP8 blocks"),
        ("mixtral", "W4A16 in order of groups"),
        ("mixtral", "FP8 tensors"),
        ("deepseek_v3", "FP8 blocks"),
    ],
)
def test_a_quantized_checkpoint(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    folder = pair_of(family, method).quantized
    # Scales have the model's dtype.
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    quantization = read_quantization(config)
    assert quantization is not None
    found = find_checkpoint(EngineArgs(str(folder)))
    planned = stated_formats(_config(folder), quantization)
    assert found.weight_formats(torch.bfloat16, CPU) == planned != ALL_NUMBERS
    assert found.weights_stored_as(torch.bfloat16, CPU) == f"{quantization.method} ({planned.names})"


@pytest.mark.parametrize("method", ON_LOAD)
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon 7b", "qwen2_moe", "deepseek_v3", "dbrx"])
def test_one_that_is_quantized_when_it_is_loaded(name: str, method: str, tmp_path: Path) -> None:
    gguf_models.tiny(*gguf_models.MODELS[name]).save_pretrained(tmp_path)
    found = find_checkpoint(EngineArgs(str(tmp_path), quantization=method))
    config, formats = _config(tmp_path), found.weight_formats(torch.float32, CPU)
    planned = on_load_formats(config, method)
    assert {slot: formats.stored(slot) for slot, _ in matrices(config)} == {
        slot: planned.stored(slot) for slot, _ in matrices(config)
    }
    assert (
        weight_bytes(config, 4, formats=formats) == weight_bytes(config, 4, formats=planned) < weight_bytes(config, 4)
    )
    assert found.weights_stored_as(torch.float32, CPU) == ON_LOAD[method].name


def test_the_catalogue_lists_what_is_read() -> None:
    listed = yaml.safe_load(CATALOGUE.read_text())["supports"]["stoker"]["cpu"]["quantizations"]
    assert {canonical_method(method) for method in listed} == {*METHODS, *ON_LOAD, "gguf"}
