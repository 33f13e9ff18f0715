"""gpt-oss's names. Its experts are stacks: of numbers with inputs in rows, or of blocks (MXFP4) with outputs in rows.
Either way the outputs of gate and up projections take turns: gate 0, up 0, gate 1, up 1 …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.models.families.fused import each_row
from stoker_engine.models.families.llama import LLAMA_NAMES
from stoker_engine.models.families.mixture import each_expert, stacked
from stoker_engine.models.families.weight_names import Fused, MovesRows, TakesTurns, WeightNames
from stoker_engine.quant.weight_target import WeightTarget

WeightTargets = Sequence[WeightTarget]
Parts = Sequence[torch.Tensor]


def _in_turns(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    """[experts, outputs, …]: of each expert what belongs to its gate, and to its up projection."""
    return [expert[part::2] for expert in tensor for part in (0, 1)]


def _in_turns_transposed(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    return _in_turns(tensor.transpose(1, 2), slots, config)


def _stacked_transposed(tensor: torch.Tensor, slots: WeightTargets, config: ModelConfig) -> Parts:
    return stacked(tensor.transpose(1, 2), slots, config)


_MLP: Final = "model.layers.{i}.mlp"

GPT_OSS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.sinks": "model.layers.{i}.self_attn.sinks",
        "layers.{i}.router": f"{_MLP}.router",
    },
    fused={
        f"{_MLP}.experts.gate_up_proj": Fused(each_expert("gate", "up"), TakesTurns(_in_turns_transposed)),
        f"{_MLP}.experts.gate_up_proj_blocks": Fused(each_expert("gate", "up"), MovesRows(_in_turns)),
        f"{_MLP}.experts.gate_up_proj_bias": Fused(each_expert("gate", "up", of="bias"), TakesTurns(_in_turns)),
        f"{_MLP}.experts.down_proj": Fused(each_expert("down"), TakesTurns(_stacked_transposed)),
        f"{_MLP}.experts.down_proj_blocks": Fused(each_expert("down"), stacked),
        f"{_MLP}.experts.down_proj_bias": Fused(each_expert("down", of="bias"), each_row),
    },
)
