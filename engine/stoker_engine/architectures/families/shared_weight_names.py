"""Weight names that most families share: Llama's names, which other families extend, fuse or rename in part.

Experts have two forms: files on the hub have three matrices per expert, transformers 5 stacks all experts of a layer.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.weight_layout import Count, Fused, Split
from stoker_engine.architectures.weight_names import WeightNames

LLAMA_NAMES: Final = {
    "embed": "model.embed_tokens",
    "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.pre_mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}

#: Norms of queries and keys.
QK_NORMS: Final = {
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
}

#: Patterns of buffers in older files, which are not needed.
ROTARY_BUFFER: Final = r"\.rotary_emb\.inv_freq$"
IGNORED: Final = (ROTARY_BUFFER, r"\.self_attn\.bias$")

LLAMA_WEIGHTS: Final = WeightNames(names=LLAMA_NAMES, ignored=IGNORED)

QKV: Final = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
GATE_UP: Final = ("layers.{i}.gate", "layers.{i}.up")

#: GGUF tensor with the gate and up projections (Phi-3, GLM-4).
GGUF_GATE_UP: Final = {"blk.{i}.ffn_up": Fused(GATE_UP, Split.ROWS)}

_MLP: Final = "model.layers.{i}.mlp"


def head_norms(q: str, k: str) -> dict[str, Fused]:
    """Return the contents of the tensors `q` and `k`: norm weights of each query and key head."""
    counts: tuple[Count, Count] = ("num_attention_heads", "num_key_value_heads")
    return {
        theirs: Fused((f"layers.{{i}}.{norm}.{{j}}",), Split.EACH_ROW, count)
        for theirs, norm, count in zip((q, k), ("q_norm", "k_norm"), counts, strict=True)
    }


GGUF_HEAD_NORMS: Final = head_norms("blk.{i}.attn_q_norm", "blk.{i}.attn_k_norm")


def expert_names(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of an expert's matrices in `block`: Stoker's name → file's name."""
    return {
        "layers.{i}.experts.{j}.gate": f"{block}.experts.{{j}}.{gate}",
        "layers.{i}.experts.{j}.up": f"{block}.experts.{{j}}.{up}",
        "layers.{i}.experts.{j}.down": f"{block}.experts.{{j}}.{down}",
    }


def expert_stack(*parts: str, split: Split = Split.EXPERTS, of: str = "weight", transposed: bool = False) -> Fused:
    """Describe a tensor with `parts` of every expert, expert by expert.

    Args:
        of: ``weight`` or ``bias``.
        transposed: see `Fused`.
    """
    names = tuple(f"layers.{{i}}.experts.{{j}}.{part}.{of}" for part in parts)
    return Fused(names, split, "num_experts", transposed)


def expert_stacks(block: str) -> dict[str, Fused]:
    """Describe the tensors with stacked experts in `block`, by their complete names: unquantized, and MXFP4 blocks."""
    gates, downs = expert_stack("gate", "up"), expert_stack("down")
    gate_up, down = f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"
    return {gate_up: gates, f"{gate_up}_blocks": gates, down: downs, f"{down}_blocks": downs}


#: Llama's names and those of a mixture of experts, as in Qwen and many others.
MOE_NAMES: Final = {
    **LLAMA_NAMES,
    "layers.{i}.router": f"{_MLP}.gate",
    **expert_names(_MLP, "gate_proj", "up_proj", "down_proj"),
}
MOE_STACKS: Final = expert_stacks(_MLP)

#: With norms of queries and keys (Qwen3-MoE, OLMoE).
QK_NORM_MOE_WEIGHTS: Final = WeightNames(names=MOE_NAMES | QK_NORMS, fused=MOE_STACKS, ignored=IGNORED)

#: DeepSeek's names of the shared experts and of the correction bias.
SHARED_EXPERTS: Final = {
    "layers.{i}.router.correction_bias": f"{_MLP}.gate.e_score_correction_bias",
    "layers.{i}.shared.gate": f"{_MLP}.shared_experts.gate_proj",
    "layers.{i}.shared.up": f"{_MLP}.shared_experts.up_proj",
    "layers.{i}.shared.down": f"{_MLP}.shared_experts.down_proj",
}

#: See `WeightNames.layer`: layers for multi-token prediction, after the last one, are not loaded.
LAYER: Final = r"^model\.layers\.(\d+)\."
