"""What checkpoints call the matrices of a model: the names of transformers' modules, by ours.

Ours (slots, see `models.decoder`) are the same in all families. What loads a checkpoint knows more: wrappers, tensors,
changes (`models.families.weight_names`). These names say which modules a ``quantization_config`` speaks of, before
there are files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class _Names:
    """A family's.

    Attributes:
        layer: what the names of a layer's modules begin with.
        parts: modules of a layer by our name, where it is another than Llama's.
        ends: those outside of layers, in the same way.
    """

    layer: str = "model.layers.{i}."
    parts: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)


_ENDS: Final = {"embed": "model.embed_tokens", "lm_head": "lm_head"}
_PARTS: Final = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj", "q_b": "self_attn.q_b_proj", "kv_a": "self_attn.kv_a_proj_with_mqa",
    "k_b": "self_attn.kv_b_proj", "v_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "experts.gate": "mlp.experts.{j}.gate_proj", "experts.up": "mlp.experts.{j}.up_proj",
    "experts.down": "mlp.experts.{j}.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj", "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip


def _all(module: str, *parts: str) -> dict[str, str]:
    return dict.fromkeys(parts, module)


_FUSED_GATES: Final = _all("mlp.gate_up_proj", "gate", "up")
_BLOOM: Final = _Names(
    "transformer.h.{i}.",
    {
        **_all("self_attention.query_key_value", "q", "k", "v"),
        "o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    },
    {"embed": "transformer.word_embeddings"},
)  # fmt: skip
_MPT: Final = _Names(
    "transformer.blocks.{i}.",
    {**_all("attn.Wqkv", "q", "k", "v"), "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"},
    {"embed": "transformer.wte"},
)
_GLM: Final = _Names(parts=_FUSED_GATES)
_MIXTRAL: Final = _Names(
    parts={
        "experts.gate": "block_sparse_moe.experts.{j}.w1", "experts.up": "block_sparse_moe.experts.{j}.w3",
        "experts.down": "block_sparse_moe.experts.{j}.w2",
    }
)  # fmt: skip
_LLAMA4: Final = _Names(
    parts={
        "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj", "down": "feed_forward.down_proj",
        **_all("feed_forward.experts.gate_up_proj", "experts.gate", "experts.up"),
        "experts.down": "feed_forward.experts.down_proj",
        **{f"shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    }
)  # fmt: skip

#: Architecture → names; all others have Llama's.
_FAMILIES: Final = {
    "BloomForCausalLM": _BLOOM,
    "FalconForCausalLM": _BLOOM,
    "RWForCausalLM": _BLOOM,
    "DbrxForCausalLM": _Names(
        "transformer.blocks.{i}.",
        {
            **_all("norm_attn_norm.attn.Wqkv", "q", "k", "v"), "o": "norm_attn_norm.attn.out_proj",
            "experts.gate": "ffn.experts.mlp.w1", "experts.up": "ffn.experts.mlp.v1",
            "experts.down": "ffn.experts.mlp.w2",
        },
        {"embed": "transformer.wte"},
    ),
    "GPT2LMHeadModel": _Names(
        "transformer.h.{i}.",
        {**_all("attn.c_attn", "q", "k", "v"), "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        {"embed": "transformer.wte"},
    ),
    "GPTJForCausalLM": _Names(
        "transformer.h.{i}.",
        {
            "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.out_proj",
            "up": "mlp.fc_in", "down": "mlp.fc_out",
        },
        {"embed": "transformer.wte"},
    ),
    "GPTNeoXForCausalLM": _Names(
        "gpt_neox.layers.{i}.",
        {
            **_all("attention.query_key_value", "q", "k", "v"), "o": "attention.dense",
            "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
        },
        {"embed": "gpt_neox.embed_in", "lm_head": "embed_out"},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "GraniteMoeForCausalLM": _Names(
        parts={
            **_all("block_sparse_moe.experts.gate_up_proj", "experts.gate", "experts.up"),
            "experts.down": "block_sparse_moe.experts.down_proj",
        }
    ),
    "GptOssForCausalLM": _Names(
        parts={
            **_all("mlp.experts.gate_up_proj", "experts.gate", "experts.up"), "experts.down": "mlp.experts.down_proj",
        }
    ),
    "InternLM2ForCausalLM": _Names(
        parts={
            **_all("attention.wqkv", "q", "k", "v"), "o": "attention.wo",
            "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
        },
        ends={"embed": "model.tok_embeddings", "lm_head": "output"},
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "MPTForCausalLM": _MPT,
    "MptForCausalLM": _MPT,
    "MixtralForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": _MIXTRAL,
    "PhiMoEForCausalLM": _MIXTRAL,
    "PhimoeForCausalLM": _MIXTRAL,
    "OPTForCausalLM": _Names(
        "model.decoder.layers.{i}.",
        {"o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
        {"embed": "model.decoder.embed_tokens"},
    ),
    "Phi3ForCausalLM": _Names(parts={**_all("self_attn.qkv_proj", "q", "k", "v"), **_FUSED_GATES}),
    "PhiForCausalLM": _Names(parts={"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}),
    "QWenLMHeadModel": _Names(
        "transformer.h.{i}.",
        {
            **_all("attn.c_attn", "q", "k", "v"), "o": "attn.c_proj",
            "gate": "mlp.w2", "up": "mlp.w1", "down": "mlp.c_proj",
        },
        {"embed": "transformer.wte"},
    ),
    "Qwen2MoeForCausalLM": _Names(
        parts={f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    ),
    "Starcoder2ForCausalLM": _Names(parts={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
}  # fmt: skip


def module_name(architecture: str, slot: str) -> str:
    """What checkpoints of an architecture call the module whose matrix has the name `slot`: ``layers.3.experts.7.gate``
    is ``model.layers.3.mlp.experts.7.gate_proj``. A module that several matrices of ours are parts of has its own
    name."""
    names = _FAMILIES.get(architecture, _Names())
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", slot)
    if match is None:
        return {**_ENDS, **names.ends}[slot]
    numbers = re.findall(r"\.(\d+)\.", match[2])
    part = re.sub(r"\.\d+\.", ".", match[2])
    name = names.layer + names.parts.get(part, _PARTS[part])
    return name.replace("{i}", match[1]).replace("{j}", numbers[0] if numbers else "0")
