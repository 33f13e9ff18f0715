"""Gemma's names: norm weights are stored less by one, and from Gemma 2 there are norms after each block, too.

Multimodal checkpoints wrap the decoder: transformers 4 and 5 put the wrapper in different places.
"""

from typing import Final

from stoker_engine.models.families.fused import plus_one
from stoker_engine.models.families.llama import LLAMA_NAMES, QK_NORMS
from stoker_engine.models.families.weight_names import Change, WeightNames

_SANDWICH: Final = {
    "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.pre_mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_CHANGES: Final = (Change(r"norm\.weight$", plus_one),)
_IGNORED: Final = (r"\.rotary_emb",)

GEMMA1: Final = WeightNames(names=LLAMA_NAMES, changes=_CHANGES, ignored=_IGNORED)
GEMMA2: Final = WeightNames(names=LLAMA_NAMES | _SANDWICH, changes=_CHANGES, ignored=_IGNORED)
GEMMA3: Final = WeightNames(
    names=LLAMA_NAMES | QK_NORMS | _SANDWICH,
    renames=(
        (r"^(language_model\.model|model\.language_model)\.", "model."),
        (r"^language_model\.lm_head", "lm_head"),
    ),
    changes=_CHANGES,
    ignored=(*_IGNORED, r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
)
