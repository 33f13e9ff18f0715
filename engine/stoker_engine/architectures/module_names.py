"""What checkpoints call the matrices of a model: the names of transformers' modules, by ours.

Ours (see `models.decoder`) are the same in all families. These names say which modules a ``quantization_config`` speaks
of, before there are files.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.families.shared_weight_names import expert_names, expert_stacks
from stoker_engine.architectures.weight_names import WeightNames

#: Of an architecture that is no family of ours, unless it is below: Llama's names, DeepSeek's experts and attention.
_DEFAULT: Final = FAMILIES["DeepseekV3ForCausalLM"].weight_names
_FEED_FORWARD: Final = "model.layers.{i}.feed_forward"
_LLAMA4: Final = WeightNames(
    names={
        **{ours: theirs for ours, theirs in _DEFAULT.names.items() if ".experts." not in ours},
        **{f"layers.{{i}}.{part}": f"{_FEED_FORWARD}.{part}_proj" for part in ("gate", "up", "down")},
        **{
            f"layers.{{i}}.shared.{part}": f"{_FEED_FORWARD}.shared_expert.{part}_proj"
            for part in ("gate", "up", "down")
        },
    },
    fused=expert_stacks(_FEED_FORWARD),
)
_MIXTRALS: Final = WeightNames(
    names={**_DEFAULT.names, **expert_names("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")},
    fused=_DEFAULT.fused,
)
_OTHERS: Final = {
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "MiniMaxM2ForCausalLM": _MIXTRALS,
    "PhiMoEForCausalLM": _MIXTRALS,
    "PhimoeForCausalLM": _MIXTRALS,
}


def module_name(architecture: str, module: str) -> str:
    """What checkpoints of an architecture call the module whose matrix has the name `module`:
    ``layers.3.experts.7.gate`` is ``model.layers.3.mlp.experts.7.gate_proj``. A module that several matrices of ours
    are parts of has its own name. A module that the family has no name for is called as in Llama's files."""
    family = FAMILIES.get(architecture)
    names = _OTHERS.get(architecture, _DEFAULT) if family is None else family.weight_names
    return names.stored_in(module) or _DEFAULT.stored_in(module) or module
