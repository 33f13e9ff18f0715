"""Every family against transformers: logits at every position and 64 greedy tokens, in fp32, batched, chunked, cached.

Each model is tiny, random and wide, and has random norms and biases, since ones and zeros hide mistakes. It is saved as
a real Hugging Face folder and read back, so names and layouts of the files are proven, not only the arithmetic.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_common.errors import ModelError
from stoker_engine import LLM, SamplingParams
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.cpu.library import library
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.sizing.weight_sizes import weight_bytes

_VOCABULARY = 128

#: Small sizes, under each family's own names.
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_NO_GROUPS = {**_SIZES, "num_key_value_heads": 4}
_FALCON = {key: value for key, value in _NO_GROUPS.items() if key not in ("intermediate_size", "num_key_value_heads")}
_ROPE = {"rope_theta": 10000.0}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **_ROPE}

#: name → transformers' model type, and the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SIZES}),
    "llama biases": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama head_dim": ("llama", {**_SIZES, "head_dim": 16}),
    "llama linear": ("llama", {**_SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, **_ROPE}}),
    "llama 3": (
        "llama",
        {**_SIZES, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "llama yarn": ("llama", {**_SIZES, "rope_parameters": _YARN}),
    "llama yarn mscale": (
        "llama",
        {**_SIZES, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "llama yarn factor": ("llama", {**_SIZES, "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 16}}),
    "llama dynamic": ("llama", {**_SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE}}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": 20}),
    "mistral no window": ("mistral", {**_SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {**_SIZES}),
    "qwen2 window": ("qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16}),
    "qwen3 bias": ("qwen3", {**_SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {**_SIZES, "head_dim": 16}),
    "gemma2": ("gemma2", {**_SIZES, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20}),
    "gemma2 no caps": (
        "gemma2",
        {
            **_SIZES,
            "sliding_window": 20,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 8,
        },
    ),
    "gemma3": ("gemma3_text", {**_SIZES, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 20}),
    "phi": ("phi", {**_NO_GROUPS, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "phi qk": ("phi", {**_SIZES, "qk_layernorm": True}),
    "phi3": ("phi3", {**_SIZES, "sliding_window": 20, "pad_token_id": 0}),
    "phi4-mini": (
        "phi3",
        {
            **_SIZES,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 1.0, **_ROPE, **_FACTORS},
        },
    ),
    "falcon 7b": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon 40b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon rw": (
        "falcon",
        {**_FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    ),
    "bloom": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "mpt clip": (
        "mpt",
        {"d_model": 48, "n_layers": 2, "n_heads": 3, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}},
    ),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt2 scales": (
        "gpt2",
        {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gptj": ("gptj", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {**_NO_GROUPS, "hidden_size": 64}),
    "gpt_neox odd": ("gpt_neox", {**_NO_GROUPS, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}),
    "gpt_neox sequential": ("gpt_neox", {**_NO_GROUPS, "use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {**_FALCON, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt 350m": ("opt", {**_FALCON, "ffn_dim": 80, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "opt bare": (
        "opt",
        {
            **_FALCON,
            "ffn_dim": 80,
            "word_embed_proj_dim": 48,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
    ),
    "glm": ("glm", {**_SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {**_SIZES, "head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "cohere": ("cohere", {**_SIZES}),
    "cohere plus": ("cohere", {**_SIZES, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {**_SIZES, "num_hidden_layers": 5, "sliding_window": 20}),
    "granite": (
        "granite",
        {
            **_SIZES,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo": ("olmo", {**_SIZES, "clip_qkv": 1.5, "pad_token_id": 0}),
    "olmo2": ("olmo2", {**_SIZES, "pad_token_id": 0}),
    "starcoder2": ("starcoder2", {**_SIZES, "sliding_window": 20}),
    "starcoder2 no bias": ("starcoder2", {**_SIZES, "use_bias": False}),
    "stablelm": ("stablelm", {**_SIZES, "hidden_size": 64, "use_qkv_bias": True}),
    "stablelm 12b": (
        "stablelm",
        {**_SIZES, "hidden_size": 64, "qk_layernorm": True, "use_parallel_residual": True},
    ),
}


def tiny(name: str) -> PreTrainedModel:
    """The tiny random model with that name in `MODELS`."""
    model_type, options = MODELS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, **options})
    # transformers' eager Falcon adds ALiBi twice, once with the mask; its sdpa Gemma 2 leaves out the soft cap.
    implementation = "sdpa" if model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data if parameter.dim() == 1 else 0)
    model.tie_weights()
    return model


def prompts(count: int = 4) -> list[list[int]]:
    """Prompts of several lengths, some longer than the windows above."""
    rng = random.Random(1)
    return [[rng.randrange(2, _VOCABULARY) for _ in range(length)] for length in (61, 9, 30, 1)[:count]]


def reference_of(theirs: PreTrainedModel) -> Callable[[list[int]], torch.Tensor]:
    """Its logits [tokens, vocabulary] for one sequence."""

    def reference(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
        return logits

    return reference


@pytest.mark.parametrize("name", MODELS)
def test_family_equals_transformers(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    assert weight_bytes(ours.config, 4) == sum(target.tensor.nbytes for target in ours.weight_targets().values())
    assert_run(paged_run(ours, prompts(), new_tokens=64), reference_of(theirs))


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "mpt clip", "falcon 40b", "stablelm 12b"])
def test_with_torchs_attention(name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any) -> None:
    """Where there are no CPU kernels, and on other devices."""
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path, backend=SdpaBackend())
    assert_run(paged_run(ours, prompts(), new_tokens=16), reference_of(theirs))


@pytest.mark.parametrize(
    "name", ["mistral", "gemma2", "gemma3", "cohere2", "falcon rw", "bloom", "mpt clip", "opt 350m", "gptj", "olmo2"]
)
def test_through_the_engine(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    """In chunks, batched, with prefix hits, and preempted: the cache has no room for all at once."""
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    blocks = {"gemma3": 500, "cohere2": 350}.get(name, 80)  # one layer in so many sees everything
    llm = LLM(str(tmp_path), block_size=4, num_gpu_blocks_override=blocks, max_model_len=160, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    todo = [*prompts(), [*prompts()[0][:40], 7]]
    outputs = [output.outputs[0].token_ids for output in llm.generate(todo, params, use_tqdm=False)]
    assert [len(output) for output in outputs] == [64] * len(todo)
    if all(layer.sliding_window is None for layer in ModelConfig.from_folder(tmp_path).layers):
        assert llm.engine.scheduler.num_preemptions > 0
    reference = reference_of(theirs)
    for prompt, output in zip(todo, outputs, strict=True):
        logits = reference(prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() <= 1e-3


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_planner_counts_what_the_engine_allocates(architecture: str) -> None:
    """At the sizes of the family's default config, in bfloat16, where wide norms take more."""
    config = ModelConfig.from_dict({"architectures": [architecture]})
    with torch.device("meta"):
        model = Decoder(config, Build(torch.bfloat16, SdpaBackend(), REFERENCE), config.default_model_len)
    assert weight_bytes(config, 2) == sum(target.tensor.nbytes for target in model.weight_targets().values())
    assert {target.tensor.device.type for target in model.weight_targets().values()} == {"meta"}
    assert weight_bytes(config, 2, tensor=1) <= 2 * weight_bytes(config, 2, tensor=2)


@pytest.mark.skipif(library() is None, reason="without the CPU's kernels a row's result depends on its batch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_is_the_same_alone_and_together(
    name: str, dtype: torch.dtype, tmp_path: Path, decoder_of: Any, paged_run: Any
) -> None:
    """Bit for bit, however both are cut into chunks."""
    tiny(name).save_pretrained(tmp_path)
    ours = decoder_of(tmp_path, dtype=dtype)
    together = paged_run(ours, prompts(), new_tokens=8, dtype=dtype)
    alone = paged_run(ours, prompts()[:1], new_tokens=8, seed=1, dtype=dtype)
    assert torch.equal(torch.stack(alone.sequences[0].logits), torch.stack(together.sequences[0].logits))


def test_an_activation_that_is_not_computed_here(tmp_path: Path, decoder_of: Any) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **MODELS["llama"][1], "hidden_act": "mish"})
    )
    with pytest.raises(ModelError, match="'mish' is not supported"):
        decoder_of(tmp_path)
