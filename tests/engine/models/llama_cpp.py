"""Writes tiny GGUF files from transformers' models, by the rules of llama.cpp's converter.

Names come from the ``gguf`` library's tensor name maps. The converter's transformations of some families' tensors are
applied here, so that reading is tested by inverting them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

#: GGUF's architecture by transformers' model type.
ARCHITECTURES = {
    "bloom": "bloom",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "llama": "llama",
    "mixtral": "llama",
    "mpt": "mpt",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
_INTERLEAVED = ("llama", "mixtral", "granite", "granitemoe", "olmo")
_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.clamp_kqv": ("clip_qkv",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "use_parallel_residual": ("use_parallel_residual",),
}


def write(
    model: PreTrainedModel,
    path: Path,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    architecture: str | None = None,
    stored: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
    dequantized: bool = False,
    quantize: Callable[[np.ndarray[Any, Any], gguf.GGMLQuantizationType], np.ndarray[Any, Any]] = gguf.quants.quantize,
) -> Path:
    """Write `model`.

    Args:
        extra: further metadata, without the architecture's prefix.
        tensors: further tensors, under GGUF's names.
        architecture: GGUF's architecture, by default that of the model's type.
        stored: type of each matrix, by GGUF's name. Tensors that llama.cpp does not quantize are float32 anyway.
        dequantized: write the quantized values as float32.
        quantize: creates the blocks of a type.
    """
    arch = architecture or ARCHITECTURES[model.config.model_type]
    writer = _new_writer(model, path, arch, extra)
    for theirs, tensor in named_tensors(model, arch):
        values = np.ascontiguousarray(tensor.float().numpy())
        kind = gguf.GGMLQuantizationType.F32 if is_plain(theirs, tensor) else stored(theirs)
        packed = quantize(values, kind)
        if dequantized:
            writer.add_tensor(theirs, gguf.quants.dequantize(packed, kind).reshape(values.shape))
        else:
            writer.add_tensor(theirs, packed, raw_dtype=kind)
    for name, tensor in (tensors or {}).items():
        packed = gguf.quants.quantize(
            tensor.float().numpy(), kind := stored(name) if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        )
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_header(model: PreTrainedModel, path: Path, stored: dict[str, gguf.GGMLQuantizationType]) -> Path:
    """Write a file with a model's metadata and its tensors' names, shapes and types, but with a hole instead of the
    data.

    The model may be on the meta device.

    Args:
        stored: type of each tensor, by GGUF's name.
    """
    arch = ARCHITECTURES[model.config.model_type]
    writer = _new_writer(model, path, arch)
    for name, tensor in named_tensors(model, arch):
        block, size = gguf.GGML_QUANT_SIZES[stored[name]]
        packed = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        is_blocks = block > 1
        writer.add_tensor_info(
            name,
            packed if is_blocks else tensor.shape,
            np.dtype(np.uint8 if is_blocks else np.float32),
            tensor.numel() // block * size,
            stored[name],
        )
    total = sum(info.nbytes + -info.nbytes % 32 for part in writer.tensors for info in part.values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 32 + total)
    return path


def named_tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the converted tensors, under GGUF's names."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], model.config.num_hidden_layers)
    for name, tensor in _tensors(model).items():
        if model.config.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"GGUF has no name for {name}"
        yield theirs, tensor


def _new_writer(model: PreTrainedModel, path: Path, arch: str, extra: dict[str, Any] | None = None) -> gguf.GGUFWriter:
    """Return a writer with a model's metadata."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_metadata(model), **(extra or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{arch}.{key}", value)
    writer.add_token_list([str(token) for token in range(model.config.vocab_size)])
    return writer


def is_plain(name: str, values: torch.Tensor) -> bool:
    """Return whether llama.cpp does not quantize this tensor (its ``tensor_allows_quantization``)."""
    return values.dim() < 2 or "norm" in name or "ffn_gate_inp" in name or name == "position_embd.weight"


def _metadata(model: PreTrainedModel) -> dict[str, Any]:
    config, kind = model.config, model.config.model_type
    given = {**config.to_dict(), **{name: getattr(config, name) for name in ("hidden_size", "num_attention_heads")}}
    if kind == "dbrx":
        given |= {**config.attn_config.to_dict(), **config.ffn_config.to_dict()}
        given |= {
            "num_key_value_heads": config.attn_config.kv_n_heads,
            "num_experts": config.ffn_config.moe_num_experts,
        }
        given |= {"num_experts_per_tok": config.ffn_config.moe_top_k, "clip_qkv": config.attn_config.clip_qkv}
        given |= {"layer_norm_eps": 1e-5, "max_position_embeddings": config.max_seq_len}
    if kind == "mpt":
        given |= {"clip_qkv": config.attn_config.clip_qkv}
    found: dict[str, Any] = {"block_count": config.num_hidden_layers}
    for key, names in _KEYS.items():
        value = next((given[name] for name in names if given.get(name) is not None), None)
        if value is not None:
            found[key] = value
    heads = found["attention.head_count"]
    size = given.get("head_dim") or found["embedding_length"] // heads
    parameters = given.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    if kind == "falcon":
        found["attention.head_count_kv"] = given["num_kv_heads"] if given["new_decoder_architecture"] else 1
        found["context_length"] = 2048
    if parameters:
        found["rope.freq_base"] = float(parameters["rope_theta"])
        found["rope.dimension_count"] = int(size * (parameters.get("partial_rotary_factor") or 1.0))
    if kind in ("deepseek_v2", "deepseek_v3"):
        found["attention.head_count_kv"] = 1
        found["attention.key_length"] = given["kv_lora_rank"] + given["qk_rope_head_dim"]
        found["attention.value_length"] = given["kv_lora_rank"]
        found["attention.key_length_mla"] = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
        found["attention.value_length_mla"] = given["v_head_dim"]
        found["rope.dimension_count"] = given["qk_rope_head_dim"]
        found["expert_gating_func"] = 2 if kind == "deepseek_v3" else 1
        if given.get("topk_method") == "greedy":
            found = {key: value for key, value in found.items() if "expert_group" not in key}
    elif "head_dim" in given or kind in ("gemma2", "gemma3_text"):
        found["attention.key_length"] = found["attention.value_length"] = size
    if parameters.get("rope_type") == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = float(parameters["factor"])
        found["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    if kind in ("llama", "mixtral"):
        found.pop("attention.sliding_window", None)
    return found


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the converted tensors, still under transformers' names."""
    config, kind = model.config, model.config.model_type
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    out: dict[str, torch.Tensor] = {}
    norms: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if kind in _INTERLEAVED and ".q_proj." in name:
            tensor = _interleaved(tensor, heads)
        if kind in _INTERLEAVED and ".k_proj." in name:
            tensor = _interleaved(tensor, kv_heads)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if kind == "gpt2" and tensor.dim() == 2 and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.T
        if kind in ("bloom", "gpt_neox") and "query_key_value" in name:
            tensor = _by_part(tensor, heads, heads)
        if kind == "falcon" and "query_key_value" in name:
            tensor = _by_part(tensor, heads, config.num_kv_heads if config.new_decoder_architecture else 1)
        if kind == "stablelm" and "layernorm.norms." in name:
            norms.setdefault(name.split(".norms.")[0] + ".weight", []).append(tensor)
        elif kind == "dbrx" and ".experts.mlp." in name:
            experts = tensor.view(config.ffn_config.moe_num_experts, -1, config.hidden_size)
            out[name + ".weight"] = experts.transpose(1, 2) if name.endswith("w2") else experts
        elif kind == "gpt_oss" and ".experts." in name:
            end = ".bias" if name.endswith("_bias") else ".weight"
            parts = tensor if end == ".bias" else tensor.transpose(1, 2)
            stem = name.removesuffix("_bias")
            if stem.endswith("gate_up_proj"):
                stem = stem.removesuffix("gate_up_proj")
                out[f"{stem}gate_proj{end}"], out[f"{stem}up_proj{end}"] = parts[:, ::2], parts[:, 1::2]
            else:
                out[stem + end] = parts
        elif name.endswith(".sinks"):
            out[name + ".weight"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj").replace("block_sparse_moe", "mlp")
            out[stem + "gate_proj.weight"], out[stem + "up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out[name.replace("block_sparse_moe", "mlp") + ".weight"] = tensor
        elif kind == "granitemoe" and name.endswith("block_sparse_moe.router.weight"):
            out[name.replace("router.weight", "router.layer.weight")] = tensor
        elif name.endswith("e_score_correction_bias"):
            out[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
        elif name.endswith("kv_b_proj.weight"):
            parts = tensor.view(heads, -1, config.kv_lora_rank)
            key, value = parts.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            out[name.replace("kv_b_proj", "k_b_proj")] = key.transpose(1, 2)
            out[name.replace("kv_b_proj", "v_b_proj")] = value
        elif name.endswith("shared_expert_gate.weight"):
            out[name] = tensor.squeeze(0)
        elif kind == "bloom":
            out[name.removeprefix("transformer.")] = tensor
        else:
            out[name] = tensor
    return out | {name: torch.stack(each) for name, each in norms.items()}


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rotary pairs from split halves to neighbours."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _by_part(tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Reorder queries, keys and values from per KV head to all queries, all keys, all values."""
    grouped = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
    query, key, value = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (query, key, value)])
