"""GGUF of every family: written by llama.cpp's rules from a tiny model of transformers, read back, compared in fp32."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.errors import ModelError
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.gguf import GGUFFile
from stoker_engine.models.weights import load_weights


def _beside(name: str) -> ModuleType:
    """A module in this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


llama_cpp = _beside("llama_cpp")

_VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_OWN_HEADS = {**_SIZES, "num_key_value_heads": 4}
_GEMMA = {**_SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MPT = {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
_FALCON = {key: value for key, value in _OWN_HEADS.items() if key not in ("intermediate_size", "num_key_value_heads")}
_MIXTURE = {**_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 16}
_GROUPS = {"n_group": 4, "topk_group": 2}
_HALF = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "cohere": ("cohere", _SIZES),
    "cohere plus": ("cohere", {**_SIZES, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**_SIZES, "num_hidden_layers": 5, "sliding_window": 20}),
    "dbrx": (
        "dbrx",
        {
            **_MPT,
            "attn_config": {"clip_qkv": 3.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_OWN_HEADS, **_SHARED, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {**_OWN_HEADS, **_SHARED, **_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", {**_OWN_HEADS, **_SHARED, **_LATENT, **_GROUPS}),
    "falcon 7b": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon 40b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gemma": ("gemma", {**_SIZES, "head_dim": 16}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "glm4": ("glm4", {**_SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": (
        "glm4_moe",
        {**_SIZES, **_SHARED, **_GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _OWN_HEADS),
    "gpt_neox sequential": ("gpt_neox", {**_OWN_HEADS, "use_parallel_residual": False}),
    "granite": ("granite", {**_SIZES, **_MULTIPLIERS}),
    "granitemoe": ("granitemoe", {**_SIZES, **_MULTIPLIERS, "num_local_experts": 4}),
    "llama": ("llama", _SIZES),
    "llama biases": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama head_dim": ("llama", {**_SIZES, "head_dim": 16}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4}),
    "mpt": ("mpt", _MPT),
    "mpt clip": ("mpt", {**_MPT, "attn_config": {"clip_qkv": 0.7}}),
    "olmo": ("olmo", {**_SIZES, "clip_qkv": 1.5, "pad_token_id": 0}),
    "olmo2": ("olmo2", {**_SIZES, "pad_token_id": 0}),
    "olmoe": ("olmoe", {**_OWN_HEADS, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "phi": ("phi", {**_OWN_HEADS, **_HALF}),
    "phi3": ("phi3", {**_SIZES, "sliding_window": 20, "pad_token_id": 0}),
    "qwen2": ("qwen2", _SIZES),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 40}),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "stablelm": ("stablelm", {**_SIZES, **_HALF, "use_qkv_bias": True}),
    "stablelm 12b": ("stablelm", {**_SIZES, **_HALF, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**_SIZES, "sliding_window": 20}),
}

#: Families whose GGUF transformers reads itself: then its reading judges our writer, too.
READ_BY_TRANSFORMERS = ("bloom", "falcon 7b", "gemma2", "llama", "qwen2", "starcoder2")


def _tiny(model_type: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        width = 0.1 if model_type == "dbrx" else 0.3
        parameter.data = torch.randn_like(parameter) * width + (parameter.data if parameter.dim() == 1 else 0)
    model.tie_weights()
    return model


def _ours(file: GGUFFile) -> Decoder:
    with torch.inference_mode():
        model = Decoder(file.config(), Build(torch.float32, SdpaBackend(), REFERENCE), max_model_len=128)
        load_weights(model, file, file.spelling())
    return model


def _assert_equal(ours: Decoder, theirs: PreTrainedModel, paged_run: Any, assert_run: Any) -> None:
    def reference(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
        return logits

    prompt = torch.randint(2, _VOCABULARY, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_run(paged_run(ours, [prompt], new_tokens=2), reference)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_read(name: str, tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    theirs = _tiny(*MODELS[name])
    path = llama_cpp.write(theirs, tmp_path / "model.gguf")
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


@pytest.mark.parametrize("bias", [False, True])
def test_internlm_2_is_read_as_a_llama_of_that_name(
    bias: bool, tmp_path: Path, paged_run: Any, assert_run: Any
) -> None:
    theirs = _tiny("llama", {**_SIZES, "attention_bias": bias})  # InternLM 2's code is remote only
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", architecture="internlm2")
    assert GGUFFile(path).config().architecture == "InternLM2ForCausalLM"
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_the_files_are_such_as_transformers_reads(name: str, tmp_path: Path) -> None:
    theirs = _tiny(*MODELS[name])
    llama_cpp.write(theirs, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.allclose(read[key], tensor, atol=1e-6), key


_THETA = {"rope_theta": 10000.0}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}


def _frequencies(model: PreTrainedModel) -> torch.Tensor:
    plain = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    return plain / model.get_decoder().rotary_emb.inv_freq


def test_linear_and_yarn_positions(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    for rope, metadata in (
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
        ),
    ):
        theirs = _tiny("qwen2", {**_SIZES, "rope_parameters": {**rope, **_THETA}})
        extra = {f"rope.scaling.{key}": value for key, value in metadata.items()}
        path = llama_cpp.write(theirs, tmp_path / f"{rope['rope_type']}.gguf", extra)
        _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_llama_3_has_its_positions_in_a_tensor(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_THETA}
    theirs = _tiny("llama", {**_SIZES, "rope_parameters": {**rope, "original_max_position_embeddings": 64}})
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", tensors={"rope_freqs.weight": _frequencies(theirs)})
    config = GGUFFile(path).config()
    assert config.default_model_len == 256  # stretched already: nothing changes at the original length
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_phi_3_has_its_factors_in_tensors(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    rope = {"rope_type": "longrope", "partial_rotary_factor": 1.0, **_THETA, **_LONG}
    options = {**_SIZES, "pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": rope}
    theirs = _tiny("phi3", options)
    factor = theirs.get_decoder().rotary_emb.attention_scaling
    extra = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": float(factor)}
    factors = {f"rope_factors_{kind}.weight": torch.tensor(_LONG[f"{kind}_factor"]) for kind in ("short", "long")}
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", extra, factors)
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    theirs = _tiny("llama", _SIZES)
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0})
    with pytest.raises(ModelError, match="odd"):
        GGUFFile(path).config()
