"""The names of mixtures of experts, DeepSeek's latent attention included.

Experts are spelled in two ways: the hub's files hold three matrices an expert, transformers 5 stacks those of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.models.families.fused import rows
from stoker_engine.models.families.llama import IGNORED, LLAMA_NAMES, QK_NORMS, QKV
from stoker_engine.models.families.weight_names import Fused, MovesRows, TakesTurns, WeightNames
from stoker_engine.quant.weight_target import WeightTarget

WeightTargets = Sequence[WeightTarget]
Parts = Sequence[torch.Tensor]


def each_expert(*parts: str, of: str = "weight") -> Callable[[ModelConfig], Sequence[str]]:
    """The slots of `parts` of every expert, expert by expert.

    Args:
        of: ``weight`` or ``bias``.
    """

    def slots(config: ModelConfig) -> Sequence[str]:
        experts = next((layer.moe.num_experts for layer in config.layers if layer.moe is not None), 0)
        return [f"layers.{{i}}.experts.{expert}.{part}.{of}" for expert in range(experts) for part in parts]

    return slots


@MovesRows
def stacked(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    """[experts, …]: all experts' matrices; where an expert has several, one below the other."""
    per_expert = len(slots) // len(tensor) if len(tensor) else 0
    if len(slots) != per_expert * len(tensor) or tensor.shape[1] % max(per_expert, 1):
        raise WeightsError(f"a tensor holds {tuple(tensor.shape)} of {len(slots)} expert matrices")
    return [part for expert in tensor for part in expert.chunk(per_expert)]


@MovesRows
def latent_key_value(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    """[heads × (key and value), latent]: what makes each head's key, and below it what makes its value."""
    heads, sizes = slots[0].full_shape[0], [slot.full_shape[1] for slot in slots]
    if len(tensor) != heads * sum(sizes):
        raise WeightsError(f"a fused tensor has {len(tensor)} rows, the model needs {heads} times {sizes}")
    return tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)  # type: ignore[no-any-return]


@MovesRows
def _below(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    """[experts × size, hidden]: experts below each other (DBRX)."""
    return tensor.chunk(len(slots))


@TakesTurns
def _below_transposed(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    return [part.T for part in tensor.chunk(len(slots))]


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """The names of one expert's matrices in `block`."""
    return {
        "layers.{i}.experts.{j}.gate": f"{block}.experts.{{j}}.{gate}",
        "layers.{i}.experts.{j}.up": f"{block}.experts.{{j}}.{up}",
        "layers.{i}.experts.{j}.down": f"{block}.experts.{{j}}.{down}",
    }


def _stacks(gate_up: str, down: str) -> dict[str, Fused]:
    """The names of all experts' matrices, in full: of numbers, and of blocks (MXFP4)."""
    gates, downs = Fused(each_expert("gate", "up"), stacked), Fused(each_expert("down"), stacked)
    return {gate_up: gates, f"{gate_up}_blocks": gates, down: downs, f"{down}_blocks": downs}


_MLP: Final = "model.layers.{i}.mlp"
_QWEN_NAMES: Final = {
    **LLAMA_NAMES,
    "layers.{i}.router": f"{_MLP}.gate",
    **_experts(_MLP, "gate_proj", "up_proj", "down_proj"),
}
_STACKED: Final = _stacks(f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj")
#: Shared experts and the correction bias, as DeepSeek spells them.
_SHARED: Final = {
    "layers.{i}.router.correction_bias": f"{_MLP}.gate.e_score_correction_bias",
    "layers.{i}.shared.gate": f"{_MLP}.shared_experts.gate_proj",
    "layers.{i}.shared.up": f"{_MLP}.shared_experts.up_proj",
    "layers.{i}.shared.down": f"{_MLP}.shared_experts.down_proj",
}
_LATENT: Final = {
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.q_a": "model.layers.{i}.self_attn.q_a_proj",
    "layers.{i}.q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm",
    "layers.{i}.q_b": "model.layers.{i}.self_attn.q_b_proj",
    "layers.{i}.kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
    "layers.{i}.kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
}

MIXTRAL: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.router": f"{_MLP}.gate",
        **_experts(_MLP, "w1", "w3", "w2"),
    },
    fused=_STACKED,
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
    ignored=IGNORED,
)

QWEN2_MOE: Final = WeightNames(
    names={
        **_QWEN_NAMES,
        "layers.{i}.shared.gate": f"{_MLP}.shared_expert.gate_proj",
        "layers.{i}.shared.up": f"{_MLP}.shared_expert.up_proj",
        "layers.{i}.shared.down": f"{_MLP}.shared_expert.down_proj",
        "layers.{i}.shared_gate": f"{_MLP}.shared_expert_gate",
    },
    fused=_STACKED,
    ignored=IGNORED,
)

#: Qwen3-MoE and OLMoE.
QWEN3_MOE: Final = WeightNames(names=_QWEN_NAMES | QK_NORMS, fused=_STACKED, ignored=IGNORED)

#: The layers past the last, which draft tokens (multi-token prediction), are not loaded.
_LAYER: Final = r"^model\.layers\.(\d+)\."

GLM4_MOE: Final = WeightNames(names=_QWEN_NAMES | QK_NORMS | _SHARED, fused=_STACKED, ignored=IGNORED, layer=_LAYER)

DEEPSEEK: Final = WeightNames(
    names=_QWEN_NAMES | _LATENT | _SHARED,
    fused={
        **_STACKED,
        "model.layers.{i}.self_attn.kv_b_proj": Fused(("layers.{i}.k_b", "layers.{i}.v_b"), latent_key_value),
    },
    ignored=IGNORED,
    layer=_LAYER,
)

GRANITE_MOE: Final = WeightNames(
    names={**LLAMA_NAMES, "layers.{i}.router": "model.layers.{i}.block_sparse_moe.router"},
    fused=_stacks(
        "model.layers.{i}.block_sparse_moe.experts.gate_up_proj", "model.layers.{i}.block_sparse_moe.experts.down_proj"
    ),
    renames=(
        (r"\.input_linear\.weight$", ".experts.gate_up_proj"),
        (r"\.output_linear\.weight$", ".experts.down_proj"),
        (r"\.router\.layer\.", ".router."),
    ),
    ignored=IGNORED,
)

DBRX: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.blocks.{i}.norm_attn_norm.norm_1",
        "layers.{i}.o": "transformer.blocks.{i}.norm_attn_norm.attn.out_proj",
        "layers.{i}.pre_mlp_norm": "transformer.blocks.{i}.norm_attn_norm.norm_2",
        "layers.{i}.router": "transformer.blocks.{i}.ffn.router.layer",
        "final_norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    fused={
        "transformer.blocks.{i}.norm_attn_norm.attn.Wqkv": Fused(QKV, rows),
        "transformer.blocks.{i}.ffn.experts.mlp.w1": Fused(each_expert("gate"), _below),
        "transformer.blocks.{i}.ffn.experts.mlp.v1": Fused(each_expert("up"), _below),
        "transformer.blocks.{i}.ffn.experts.mlp.w2": Fused(each_expert("down"), _below_transposed),
    },
)
