"""Gemma 3: norms before and after each block, normalised queries and keys, local and global layers."""

from stoker_engine.contract.errors import ModelError
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.models.family import Family, WeightNames
from stoker_engine.models.llama import LLAMA_NAMES


def _check(config: ModelConfig) -> None:
    if config.attn_logit_softcapping is not None:
        raise ModelError("attn_logit_softcapping is not supported for Gemma 3; set it to null in config.json")


GEMMA3 = Family(
    sandwich_norms=True,
    qk_norm=True,
    wide_norms=True,
    scaled_embedding=True,
    check=_check,
    safetensors=WeightNames(
        names={
            **LLAMA_NAMES,
            "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
            "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
            "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
            "layers.{i}.pre_mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
            "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
        },
        # Multimodal checkpoints wrap the decoder: transformers 4 and 5 put the wrapper in different places.
        renames=(
            (r"^(language_model\.model|model\.language_model)\.", "model."),
            (r"^language_model\.lm_head", "lm_head"),
        ),
        ignored=(r"\.rotary_emb", r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
        norm_offset=1.0,
    ),
    gguf=WeightNames(
        names={
            "embed": "token_embd",
            "layers.{i}.input_norm": "blk.{i}.attn_norm",
            "layers.{i}.q": "blk.{i}.attn_q",
            "layers.{i}.k": "blk.{i}.attn_k",
            "layers.{i}.v": "blk.{i}.attn_v",
            "layers.{i}.o": "blk.{i}.attn_output",
            "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
            "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
            "layers.{i}.post_attention_norm": "blk.{i}.post_attention_norm",
            "layers.{i}.pre_mlp_norm": "blk.{i}.ffn_norm",
            "layers.{i}.gate": "blk.{i}.ffn_gate",
            "layers.{i}.up": "blk.{i}.ffn_up",
            "layers.{i}.down": "blk.{i}.ffn_down",
            "layers.{i}.post_mlp_norm": "blk.{i}.post_ffw_norm",
            "final_norm": "output_norm",
            "lm_head": "output",
        },
    ),
)
