"""Check whether a transformers class can run on paged attention, and derive the cache specs of its layers."""

from __future__ import annotations

import sys
from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from stoker_common.errors import ModelError
from stoker_engine.architectures.cache_spec import CacheSpec

_WINDOWS: Final = {"full_attention": False, "attention": False, "sliding_attention": True}


def model_class(config: PreTrainedConfig, architecture: str) -> type[PreTrainedModel]:
    """Return transformers' class for `architecture`.

    Raises:
        ModelError: the model is not a text decoder, or cannot run on paged attention; the message states why.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"{architecture} is an encoder-decoder; this engine serves decoder-only language models")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{architecture} is a multimodal model ({part}), whose text decoder cannot be served alone; "
                "use the family's text-only model"
            )
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # The hub and transformers may differ in case: PhiMoEForCausalLM, PhimoeForCausalLM.
    if cls is None or cls.__name__.lower() != architecture.lower():
        raise ModelError(f"{architecture} is not a causal language model; this engine serves autoregressive decoders")
    check_class(cls, config)
    model: type[PreTrainedModel] = cls
    return model


def check_class(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Reject classes that do not use transformers' attention interface with a KV cache.

    Raises:
        ModelError: the message states why.
    """
    recurrent = sorted(set(getattr(config, "layer_types", None) or ()) - set(_WINDOWS))
    if recurrent:
        raise ModelError(
            f"{cls.__name__} has {', '.join(recurrent)} layers; only full and sliding attention are supported"
        )
    if getattr(cls, "_is_stateful", False):
        raise ModelError(f"{cls.__name__} has a recurrent state; only models with a KV cache are supported")
    if not cls.is_backend_compatible():
        raise ModelError(
            f"{cls.__name__} does not support transformers' attention interface, so it cannot run on the paged cache"
        )


def cache_specs(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> list[CacheSpec]:
    """Return the cache spec of each layer as derived from the config; `model.TransformersModel` verifies the specs.

    ``layer_types`` states which layers have a sliding window. Without it, all layers have a window if the config states
    one and the model's code can create a sliding-window mask.
    """
    heads = config.num_attention_heads
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_head_dim = head_dim
    if getattr(config, "kv_lora_rank", None):  # transformers expands the latent to keys and values of all heads
        kv_heads, head_dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        value_head_dim = config.v_head_dim
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = window is not None and hasattr(sys.modules[cls.__module__], "create_sliding_window_causal_mask")
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    return [CacheSpec(kv_heads, head_dim, value_head_dim, window if _WINDOWS[kind] else None) for kind in kinds]
