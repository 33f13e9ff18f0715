"""Map from Stoker's module names to those in checkpoints, which are transformers' names.

Stoker's names (see `models.decoder`) are the same in all families. With the map, the modules that a
``quantization_config`` names are found without reading weight files.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.families.shared_weight_names import expert_names, expert_stacks
from stoker_engine.architectures.weight_names import WeightNames

#: Names for architectures that are neither in `FAMILIES` nor in `_OTHERS`: Llama's names, with DeepSeek's experts and
#: attention.
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
    """Return the name in an architecture's checkpoints of Stoker's module `module`: ``layers.3.experts.7.gate`` is
    ``model.layers.3.mlp.experts.7.gate_proj``. If the checkpoint's module merges several of Stoker's modules, its name
    is returned for each of them. A module that is unknown to the family has its name in `_DEFAULT`, or else Stoker's
    name."""
    family = FAMILIES.get(architecture)
    names = _OTHERS.get(architecture, _DEFAULT) if family is None else family.weight_names
    return names.stored_in(module) or _DEFAULT.stored_in(module) or module
