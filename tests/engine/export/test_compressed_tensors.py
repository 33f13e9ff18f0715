"""Folders written by ``stoker quantize``, checked with compressed-tensors and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from stoker_common.errors import ArgumentError, ModelError, StokerError, WeightsError
from stoker_engine.export.compressed_tensors import export
from stoker_engine.export.round_to_nearest import quantized
from stoker_engine.export.schemes import SCHEMES, Scheme, with_group_size

from ...support.engine.tiny_configs import BLOCK_SIZES, GGUF, VOCABULARY
from ...support.engine.tiny_models import tiny_gguf

_SIZES: dict[str, Any] = {
    **BLOCK_SIZES,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_MIXTURE = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "tied, biases": ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "fused": ("phi3", _SIZES),
    "gpt_neox": ("gpt_neox", {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4}),
    "shared expert": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", _MIXTURE),
    "latent": ("deepseek_v3", _LATENT),
}


def _save(folder: Path, name: str, dtype: torch.dtype = torch.float32, **save: Any) -> PreTrainedModel:
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options)).to(dtype).eval()
    model.save_pretrained(folder, **save)
    return model


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_tensors_equal_those_of_the_library(name: str, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = SCHEMES[name] if not SCHEMES[name].group_size else with_group_size(SCHEMES[name], 32)
    theirs = QuantizationScheme(**scheme.config([])["config_groups"]["group_0"])
    weights = torch.randn(37, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    if scheme.symmetric:
        weights[3] = 0  # the library's zero point is nan there
    weights[4, :32] = weights[4, :32].abs() + 1
    weights[5] *= 1e-5
    grouped = weights.view(37, -1, scheme.group_size or 96)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), theirs.weights)
    state = {"weight": weights.float(), "weight_scale": scales.float()}
    if not scheme.symmetric:
        state["weight_zero_point"] = zeros
    expected = BaseCompressor.get_value_from_registry(scheme.format).compress(state, theirs)
    ours = quantized(weights, scheme)
    assert ours.keys() == expected.keys()
    for end, tensor in ours.items():
        assert tensor.shape == expected[end].shape
        assert tensor.dtype == (dtype if end == "weight_scale" else expected[end].dtype)
        if dtype == torch.float32 or scheme.symmetric:
            assert torch.equal(tensor.float(), expected[end].float()), end


@pytest.mark.parametrize("name", SCHEMES)
def test_config_equals_that_of_the_library(name: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    stated = SCHEMES[name].config(["lm_head"])
    preset = preset_name_to_scheme(name, ["Linear"])
    preset.format = stated["format"]
    theirs = QuantizationConfig(
        config_groups={"group_0": preset}, ignore=["lm_head"], quantization_status="compressed", format=stated["format"]
    ).to_dict()
    del theirs["moe_sparsity_config"]
    assert {**theirs, "sparsity_config": {}, "transform_config": {}} == stated


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_exported_models(name: str, tmp_path: Path) -> None:
    original = _save(tmp_path / "model", name)
    export(tmp_path / "model", with_group_size(SCHEMES["W4A16"], 32), "W4A16", tmp_path / "int4")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "int4", quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    )
    weights, changed = dict(loaded.named_parameters()), 0
    for parameter, expected in original.named_parameters():
        found = weights[parameter]
        if torch.equal(found, expected):
            assert not parameter.endswith(("_proj.weight", "_proj", "dense_h_to_4h.weight")) or "kv_b_proj" in parameter
            continue
        changed += 1
        grouped = expected.detach().unflatten(-1, (-1, 32))
        step = grouped.abs().amax(-1, keepdim=True) / 7.5
        assert (found.detach().unflatten(-1, (-1, 32)) - grouped).abs().le(step * 0.501).all(), parameter
    assert changed >= 2 * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_logits_of_exported_models_are_close(scheme: str, tmp_path: Path) -> None:
    original = _save(tmp_path / "model", "llama", torch.bfloat16)
    used = SCHEMES[scheme] if not SCHEMES[scheme].group_size else with_group_size(SCHEMES[scheme], 32)
    export(tmp_path / "model", used, scheme, tmp_path / "new")
    # The library allocates no packed zero points, so those models are dequantized on load.
    how = {} if used.symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new", **how)
    tokens = torch.randint(2, 128, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = original(tokens).logits.float(), loaded(tokens).logits.float()
    close = torch.cosine_similarity(expected, logits, dim=-1).min()
    assert close > {4: 0.97, 8: 0.998}[used.bits]


def test_weights_keep_their_files_and_other_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "new"
    _save(source, "llama", torch.bfloat16, max_shard_size="60KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("not to be copied")
    export(source, SCHEMES["FP8_DYNAMIC"], "FP8_DYNAMIC", target)
    names = {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in target.iterdir()} == names
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    tensors = _tensors(target)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert all(index["weight_map"][name] == path.name for name in file.keys())  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((source / "config.json").read_text())


def test_stacked_experts_become_modules(tmp_path: Path) -> None:
    """All spellings of experts give the same output."""
    source, stacked = tmp_path / "model", tmp_path / "stacked"
    _save(source, "qwen3_moe")
    tensors = _tensors(source)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors.pop(f"{block}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(4)
        ]
        tensors[f"{block}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        tensors[f"{block}.down_proj"] = torch.stack([down for _, _, down in each])
    stacked.mkdir()
    (stacked / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, stacked / "model.safetensors")
    for folder in (source, stacked):
        export(folder, SCHEMES["W8A8"], "W8A8", folder.with_suffix(".new"))
    expected, found = _tensors(source.with_suffix(".new")), _tensors(stacked.with_suffix(".new"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_impossible_exports_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "model", tmp_path / "new"
    _save(source, "llama")
    scheme = SCHEMES["W4A16"]

    def refused(error: type[StokerError], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            export(source, changes.get("scheme", scheme), "W4A16", changes.get("target", target))
        assert [path for path in tmp_path.iterdir() if path != source] == changes.get("beside", [])

    refused(ArgumentError, r"128 does not divide the model's rows of 64 elements; use --group-size 32")
    fits = with_group_size(scheme, 32)
    refused(ArgumentError, "exists; remove it", scheme=fits, target=source)
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        refused(ArgumentError, "0 MiB free", scheme=fits)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        with_group_size(scheme, 20)
    with pytest.raises(ArgumentError, match="one scale for each row"):
        with_group_size(SCHEMES["W8A8"], 32)

    config = source / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps({**given, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    refused(ModelError, "already quantized by gptq, but W4A16 is requested", scheme=fits)
    config.write_text(json.dumps({**given, "architectures": ["NobodysModel"]}))
    refused(ModelError, "does not support NobodysModel; quantize the model", scheme=fits)
    config.write_text(json.dumps(given))

    weights = source / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].log()}, weights)
    refused(WeightsError, f"{name} holds nan or infinity", scheme=fits)
    save_file({**tensors, name: tensors[name].int()}, weights)
    refused(WeightsError, f"{name} holds int32", scheme=fits)


def _changed(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of a model; None removes them."""
    tensors = {**_tensors(folder), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


_Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{_Q}.weight": None}, r"lack 1 matrices that the model needs: layers\.1\.q\.weight"),
        ({f"{_Q}.weight": torch.ones(0, 64)}, rf"{_Q}\.weight holds 0 rows of 64 elements .* the model needs 64 of 64"),
        ({f"{_Q}.weight": torch.ones(64, 0)}, "holds 64 rows of 0 elements"),
        ({f"{_Q}.weight": torch.ones(64, 96)}, "holds 64 rows of 96 elements"),
        ({_Q.replace("1", "2", 1) + ".weight": torch.ones(64, 64)}, r"1 tensors .* does not use: model\.layers\.2"),
        ({f"{_Q}.weight_scale": torch.ones(64, 1)}, rf"does not use: {_Q}\.weight_scale"),
        ({f"{_Q}.qweight": torch.ones(8, 64).int()}, rf"does not use: {_Q}\.qweight"),
        ({f"{_Q}.weight": None, f"{_Q}.qweight": torch.ones(8, 64).int()}, "lack 1 matrices"),
    ],
)
def test_files_of_another_model_are_refused_before_anything_is_written(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "model", "llama")
    _changed(tmp_path / "model", changes)
    monkeypatch.setattr("stoker_engine.export.compressed_tensors.new_output", None)
    with pytest.raises(WeightsError, match=message):
        export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")


@pytest.mark.parametrize(
    "shape, message",
    [
        ((0, 64, 64), r"gate_up_proj has shape \[0, 64, 64\], but the model has 4 experts with 2 matrices each"),
        ((4, 0, 64), "holds 0 rows of 64 elements as .*experts.0.gate_proj, but the model needs 32 of 64"),
        ((4, 65, 64), r"gate_up_proj has shape \[4, 65, 64\]"),
        ((4, 66, 64), "holds 33 rows of 64 elements as .*experts.0.gate_proj, but the model needs 32 of 64"),
        ((2, 128, 64), r"gate_up_proj has shape \[2, 128, 64\]"),
        ((8, 64, 64), r"gate_up_proj has shape \[8, 64, 64\]"),
        ((4, 64, 96), "holds 32 rows of 96 elements"),
    ],
)
def test_stacks_of_other_experts_are_refused(shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    _save(tmp_path / "model", "qwen3_moe")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    matrices = dict.fromkeys(each for each in _tensors(tmp_path / "model") if "layers.0.mlp.experts." in each)
    down = torch.ones(4, 64, 32)
    _changed(tmp_path / "model", {**matrices, name: torch.ones(shape), name.replace("gate_up", "down"): down})
    with pytest.raises(WeightsError, match=message):
        export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_duplicate_experts_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "model", "qwen3_moe")
    _changed(tmp_path / "model", {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 64, 64)})
    with pytest.raises(WeightsError, match=r"weights contain layers\.0\.experts\.\d\.gate\.weight twice"):
        export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")


@pytest.mark.parametrize("name", GGUF)
def test_matrices_of_every_family_are_quantized_or_refused(name: str, tmp_path: Path) -> None:
    model = tiny_gguf(name)
    model.save_pretrained(tmp_path / "model")
    scheme = SCHEMES["FP8_DYNAMIC"]
    if model.config.model_type in ("dbrx", "gpt2", "gpt_oss", "granitemoe"):
        with pytest.raises(ModelError, match="stores only linear modules"):
            export(tmp_path / "model", scheme, "FP8_DYNAMIC", tmp_path / "new")
    else:
        export(tmp_path / "model", scheme, "FP8_DYNAMIC", tmp_path / "new")
        codes = [tensor for tensor in _tensors(tmp_path / "new").values() if tensor.dtype == torch.float8_e4m3fn]
        assert len(codes) >= 2 * 4


def test_scales_of_float64_models_are_float32(tmp_path: Path) -> None:
    _save(tmp_path / "model", "llama", torch.float64)
    for name, scheme in SCHEMES.items():
        used = with_group_size(scheme, 32) if scheme.group_size else scheme
        export(tmp_path / "model", used, name, tmp_path / name)
        scales = [tensor for end, tensor in _tensors(tmp_path / name).items() if end.endswith("weight_scale")]
        assert len(scales) == 2 * 7 and {tensor.dtype for tensor in scales} == {torch.float32}


def test_each_shape_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "model", "qwen3_moe", torch.float16)
    tried = []

    def counted(weights: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
        if weights.is_meta:
            tried.append(weights.shape)
        return quantized(weights, scheme)

    monkeypatch.setattr("stoker_engine.export.compressed_tensors.quantized", counted)
    export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")
    assert len(tried) == len(set(tried))


def test_matrices_outside_of_linear_modules_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt2"](vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"c_attn\.weight, of shape \[32, 96\], is not a linear module \(GPT2LMHeadModel\)"
    ):
        export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")
