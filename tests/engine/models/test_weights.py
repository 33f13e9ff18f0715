"""Strict loading: no missing or unused tensors, and the names of several wrappers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from stoker_common.errors import ModelError, WeightsError
from stoker_engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


def _changed(model: Path, target: Path, change: Callable[[Tensors], Tensors]) -> str:
    folder = shutil.copytree(model, target / "changed")
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


def _output(model: str | Path) -> list[int]:
    return (
        LLM(str(model), num_gpu_blocks_override=64)
        .generate([5, 6, 7, 8], GREEDY, use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )


def test_a_missing_tensor_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = _changed(tiny_llama, tmp_path, lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(WeightsError, match=r"layers\.1\.up\.weight"):
        LLM(model)


def test_an_unused_tensor_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    model = _changed(tiny_llama, tmp_path, lambda t: {**t, "model.layers.2.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        LLM(model)


def test_unknown_column_order_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.columns"
    model = _changed(tiny_llama, tmp_path, lambda t: {**t, name: torch.zeros(64)})
    with pytest.raises(WeightsError, match=re.escape(name)):
        LLM(model)


def test_a_misshapen_tensor_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    model = _changed(tiny_llama, tmp_path, lambda t: {**t, "model.norm.weight": torch.ones(65)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape"):
        LLM(model)


def test_a_doubled_tensor_is_an_error(tiny_gemma3: Path, tmp_path: Path) -> None:
    twice = {"language_model.model.norm.weight": torch.zeros(64)}
    model = _changed(tiny_gemma3, tmp_path, lambda t: {**t, **twice})
    with pytest.raises(WeightsError, match=r"final_norm\.weight twice"):
        LLM(model)


def test_a_fused_tensor_of_another_size_is_an_error(tmp_path: Path, decoder_of: Any) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4}
    theirs = Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=128, pad_token_id=0))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.qkv_proj\.weight: a fused tensor has 144 rows"):
        decoder_of(tmp_path)


def test_tensors_that_the_family_ignores_are_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert _output(_changed(tiny_llama, tmp_path, lambda t: {**t, **extra})) == _output(tiny_llama)


@pytest.mark.parametrize(("decoder", "other"), [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_text_model_of_a_multimodal_wrapper_is_loaded(
    tiny_gemma3: Path, tmp_path: Path, decoder: str, other: str
) -> None:
    def wrap(tensors: Tensors) -> Tensors:
        vision = {f"{other}vision_tower.patch.weight": torch.zeros(2), f"{other}multi_modal_projector.w": torch.ones(1)}
        return {name.replace("model.", decoder, 1): tensor for name, tensor in tensors.items()} | vision

    folder = Path(_changed(tiny_gemma3, tmp_path, wrap))
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    assert _output(folder) == _output(tiny_gemma3)


def test_unsupported_dtype_is_refused_unless_another_is_chosen(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "float64")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    with pytest.raises(ModelError, match="--dtype"):
        LLM(str(folder))
    assert LLM(str(folder), dtype="float32", num_gpu_blocks_override=8)


def test_missing_and_invalid_weight_files_are_errors(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="safetensors"):
        LLM(str(folder))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(WeightsError, match="cannot read"):
        LLM(str(folder))


def test_invalid_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF? no")
    with pytest.raises(ModelError, match="GGUF"):
        LLM(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ],
)
def test_llama_variants_equal_transformers(
    overrides: dict[str, Any], tiny_llama: Path, tmp_path: Path, assert_greedy: Any
) -> None:
    torch.manual_seed(1)
    given = {**json.loads((tiny_llama / "config.json").read_text()), **overrides}
    folder = shutil.copytree(tiny_llama, tmp_path / "llama")
    model = LlamaForCausalLM(LlamaConfig(**given)).float().eval()
    model.save_pretrained(folder)
    assert_greedy(
        folder,
        [5, 6, 7, 8] * 20,
        LLM(str(folder), num_gpu_blocks_override=64).generate([5, 6, 7, 8] * 20, GREEDY)[0].outputs[0].token_ids,
    )


def test_shards_are_read_through_their_index(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert _output(folder) == _output(tiny_llama)
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(WeightsError, match="lacks"):
        LLM(str(folder))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_nan_and_infinite_weights_are_refused_by_name(
    tiny_llama: Path, tmp_path: Path, name: str, number: float
) -> None:
    def damage(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[-3] = number
        return tensors

    with pytest.raises(WeightsError, match=f"{re.escape(name)} holds nan or infinity as float32"):
        LLM(_changed(tiny_llama, tmp_path, damage))


def test_weights_too_large_for_the_dtype_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = _changed(tiny_llama, tmp_path, lambda t: {**t, "model.norm.weight": t["model.norm.weight"] * 1e6})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight holds nan or infinity as float16.*--dtype float32"):
        LLM(model, dtype="float16")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool], ids=str)
def test_integer_weights_are_refused(tiny_llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = _changed(tiny_llama, tmp_path, lambda t: {**t, name: t[name].to(dtype)})
    with pytest.raises(WeightsError, match=f"{re.escape(name)} holds .*int|bool.*not floating-point"):
        LLM(model)
