"""The planned formats of a quantized model's weights equal those that the engine finds in its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.module_names import module_name
from stoker_engine.architectures.quantization.on_load import FP8_ROWS, ON_LOAD
from stoker_engine.architectures.quantization.read import METHODS, read_quantization
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sizing.named_experts import first_expert
from stoker_engine.sizing.planned_formats import on_load_formats, stated_formats
from stoker_engine.sizing.quantized_weights import canonical_method
from stoker_engine.sizing.weight_formats import ALL_NUMBERS
from stoker_engine.sizing.weight_sizes import matrices, weight_bytes

from ...support.engine.tiny_models import tiny_gguf
from ...support.work import work
from ..quant.conftest import pair_of as pair_of
from ..quant.quantized_pairs import Pair
from ..quant.test_packed_models import pair_of as packed_pair_of  # noqa: F401

CPU = torch.device("cpu")
CATALOGUE = Path(__file__).parents[3] / "operator/stoker_operator/plan/catalogue.yaml"


#: Configs without information about head, embedding and routers.
_SILENT: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 32},
    {"quant_method": "awq", "bits": 4, "group_size": 32},
    {"quant_method": "fp8"},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
]


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
def test_planned_formats_equal_those_of_the_files(
    family: str, method: str, pair_of: Callable[[str, str], Pair]
) -> None:
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


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in ("GPTQ of 3 bits", "GPTQ of 8 bits", "AWQ in bfloat16", "int8", "nf4")),
        *(("phi3", method) for method in ("GPTQ", "AWQ", "nf4")),
        *(("mixtral", method) for method in ("GPTQ in order of groups", "AWQ", "int8")),
    ],
)
def test_planned_formats_of_packed_words_equal_those_of_the_files(
    family: str,
    method: str,
    packed_pair_of: Callable[[str, str], tuple[Path, Path]],  # noqa: F811
) -> None:
    folder, _ = packed_pair_of(family, method)
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    planned = stated_formats(_config(folder), quantization)
    assert find_checkpoint(EngineArgs(str(folder))).weight_formats(torch.bfloat16, CPU) == planned != ALL_NUMBERS


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("stated", _SILENT, ids=lambda stated: str(stated["quant_method"]))
def test_head_and_embedding_are_unquantized_by_default(architecture: str, stated: dict[str, Any]) -> None:
    quantization = read_quantization({"quantization_config": stated})
    assert quantization is not None
    for module in ("embed", "lm_head"):
        assert quantization.format_of(module_name(architecture, module), 512, 64) is None
    for module, _ in matrices(ModelConfig.from_dict({"architectures": [architecture]}), first_expert):
        if module.startswith("layers.1."):
            assert quantization.format_of(module_name(architecture, module), 64, 64) is not None, module


def test_experts_of_mixed_formats_are_dequantized(
    pair_of: Callable[[str, str], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = pair_of("mixtral", "W8A8")
    config = json.loads((pair.quantized / "config.json").read_text()) | {"dtype": "bfloat16"}
    config["quantization_config"]["ignore"].append(r"re:.*layers\.1\..*experts\.2\.w2$")
    (pair.quantized / "config.json").write_text(json.dumps(config))
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors = load_file(pair.quantized / "model.safetensors")
    del tensors[f"{name}_scale"]
    tensors[name] = load_file(pair.dequantized / "model.safetensors")[name]
    save_file(tensors, pair.quantized / "model.safetensors")
    quantization = read_quantization(config)
    assert quantization is not None
    planned = stated_formats(_config(pair.quantized), quantization)
    assert (
        planned.stored("layers.1.experts.0.down.weight") is None is not planned.stored("layers.0.experts.2.down.weight")
    )
    with caplog.at_level("INFO"):
        assert find_checkpoint(EngineArgs(str(pair.quantized))).weight_formats(torch.bfloat16, CPU) == planned
    assert "experts of 1 layers, since their formats differ" in caplog.text


@pytest.mark.parametrize("stated", _SILENT, ids=lambda stated: str(stated["quant_method"]))
@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_quantized_files_of_transposed_families_are_refused(
    family: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    tiny_gguf(family).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = read_quantization(config)
    assert quantization is not None
    with pytest.raises(ModelError, match=r"checkpoints hold matrices transposed.*use"):
        stated_formats(_config(tmp_path), quantization)
    with pytest.raises(ModelError, match=r"checkpoints hold matrices transposed.*use"):
        find_checkpoint(EngineArgs(str(tmp_path)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ON_LOAD)
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon 7b", "qwen2_moe", "deepseek_v3", "dbrx"])
def test_planned_formats_on_load_equal_those_of_the_engine(name: str, method: str, device: str, tmp_path: Path) -> None:
    tiny_gguf(name).save_pretrained(tmp_path)
    found = find_checkpoint(EngineArgs(str(tmp_path), quantization=method))
    config, formats = _config(tmp_path), found.weight_formats(torch.float32, torch.device(device))
    planned = on_load_formats(config, method, on_cpu=device == "cpu")
    assert {module: formats.stored(module) for module, _ in matrices(config)} == {
        module: planned.stored(module) for module, _ in matrices(config)
    }
    assert (
        weight_bytes(config, 4, formats=formats) == weight_bytes(config, 4, formats=planned) < weight_bytes(config, 4)
    )
    names = found.weights_stored_as(torch.float32, torch.device(device)).split(", ")
    assert names == [(FP8_ROWS if device == "cuda" and method == "fp8" else ON_LOAD[method]).name]


def test_catalogue_lists_all_supported_quantizations() -> None:
    listed = yaml.safe_load(CATALOGUE.read_text())["supports"]["stoker"]["cpu"]["quantizations"]
    assert {canonical_method(method) for method in listed} == {*METHODS, *ON_LOAD, "gguf"}


@pytest.mark.parametrize(
    "ignored",
    [
        [],
        ["lm_head", "re:.*self_attn.*"],
        ["model.layers.1.mlp.experts.37.down_proj"],
        [r"re:.*experts\.2[0-9]\..*"],
        ["re:.*layers.1.mlp.experts.2[0-9].*"],
        [r"re:.*experts\.\d\.up_proj"],
        ["model.layers.3.mlp.experts.*", "experts.64"],
        ["re:.*experts.(7|63).gate_proj$"],
    ],
)
def test_named_experts_stand_for_all(ignored: list[str]) -> None:
    config = ModelConfig.from_dict(_MIXTURE)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    stated = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ignored,
    }  # fmt: skip
    given = {**_MIXTURE, "quantization_config": stated}
    quantization = read_quantization(given)
    assert quantization is not None
    assert stated_formats(config, quantization, given) == stated_formats(config, quantization)
    few = work(lambda: stated_formats(config, quantization, given))
    more = ModelConfig.from_dict({**_MIXTURE, "num_experts": 8 * 65})
    assert work(lambda: stated_formats(more, quantization, given)) < 1.5 * few, "the work grows with the experts"


_MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "num_experts": 65, "num_experts_per_tok": 2, "max_position_embeddings": 128,
}  # fmt: skip
