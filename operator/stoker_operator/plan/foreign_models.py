"""Sizes of models that run with vLLM, also those that Stoker's engine does not support, computed from config.json.

Stoker's engine needs a full description of a model; a plan needs sizes only. For the architectures in the
tables they are computed in one of two ways:

    as a family's  the tensors have the sizes of a family of `architectures.families` (`_LIKE`)
    by fields      attention, MLP and experts follow from the common fields of config.json (`_BY_FIELDS`)

The size of an encoder of images or audio follows from its own config. The tables list architectures that vLLM supports
and whose sizes a test compares with transformers' classes. The shape of an architecture that neither the tables nor
Stoker's engine know is unknown: vLLM checks when it starts whether the model fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.text_config import text_of

#: Architecture → family by whose rules the sizes of its text model are computed; empty if the text model's config names
#: the family.
_LIKE: Final = {
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "ChatGLMModel": "Qwen2ForCausalLM",
    "DeepseekV32ForCausalLM": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "InternVLChatModel": "",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "LlavaForConditionalGeneration": "",
    "LlavaNextForConditionalGeneration": "",
    "LlavaOnevisionForConditionalGeneration": "",
    "Mistral3ForConditionalGeneration": "",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM": "LlamaForCausalLM",
}


@dataclass(frozen=True)
class _Mixture:
    """Names of the config fields that describe a family's experts; empty if the family has no such field.

    Attributes:
        count: number of routed experts of a layer.
        size: intermediate size of an expert.
        per_token: number of routed experts per token.
        shared: number of shared experts.
        always_shared: not a name: number of shared experts that no field states.
        dense: intermediate size of dense layers.
        every: interval of MoE layers.
        first, last: index of the first and the last layer that may be MoE.
    """

    count: str = "num_local_experts"
    size: str = "intermediate_size"
    per_token: str = "num_experts_per_tok"
    shared: str = ""
    always_shared: int = 0
    dense: str = "intermediate_size"
    every: str = ""
    first: str = ""
    last: str = ""


@dataclass(frozen=True)
class _Sizes:
    """Properties that determine a family's sizes, besides the config fields that all families have.

    Attributes:
        gated: whether its MLPs are gated.
        mixture: fields of its experts; None if it is not MoE, whatever fields a file has.
        bias: name of the field that states whether attention has biases; empty if it never has.
    """

    gated: bool = True
    mixture: _Mixture | None = None
    bias: str = "attention_bias"


_LLAMA4: Final = _Sizes(
    mixture=_Mixture(always_shared=1, dense="intermediate_size_mlp", every="interleave_moe_layer_step")
)
_ERNIE_MOE: Final = _Mixture(
    count="moe_num_experts",
    size="moe_intermediate_size",
    per_token="moe_k",
    shared="moe_num_shared_experts",
    every="moe_layer_interval",
    first="moe_layer_start_index",
    last="moe_layer_end_index",
)
#: Architecture → the properties that determine its sizes.
_BY_FIELDS: Final = {
    "ApertusForCausalLM": _Sizes(gated=False),
    "ArceeForCausalLM": _Sizes(gated=False),
    "Ernie4_5ForCausalLM": _Sizes(bias="use_bias"),
    "Ernie4_5_MoeForCausalLM": _Sizes(mixture=_ERNIE_MOE, bias="use_bias"),
    "Exaone4ForCausalLM": _Sizes(bias=""),
    "HunYuanDenseV1ForCausalLM": _Sizes(),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "MiniMaxM2ForCausalLM": _Sizes(mixture=_Mixture(), bias=""),
    "NemotronForCausalLM": _Sizes(gated=False),
    "Olmo3ForCausalLM": _Sizes(),
    "PhimoeForCausalLM": _Sizes(mixture=_Mixture()),
    "PhiMoEForCausalLM": _Sizes(mixture=_Mixture()),
    "SeedOssForCausalLM": _Sizes(),
}
#: Usual field name → its name in ChatGLM's files.
_CHATGLM: Final = {
    "vocab_size": "padded_vocab_size",
    "num_key_value_heads": "multi_query_group_num",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
}
#: Fields that hold the configs of encoders.
_ENCODERS: Final = ("vision_config", "audio_config")
#: Architectures and encoder model types whose encoders have gated MLPs, whatever their ``hidden_act`` is.
_GATED_ENCODERS: Final = (
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "pixtral",
)
#: Layer type with a limited attention window → field with the window's size in tokens.
_WINDOWS: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
#: Fields of layers whose cache holds something else than keys and values.
_NOT_ATTENTION: Final = ("ssm_cfg", "mamba_d_state", "linear_num_key_heads", "hybrid_override_pattern")


def foreign_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of the model that a parsed config.json without ``quantization_config`` describes.

    Raises:
        ModelError: the sizes are not known.
    """
    named = next((name for name in config.get("architectures") or [] if name in _LIKE or name in _BY_FIELDS), None)
    if named is None:
        found = ModelConfig.from_dict(config)
    elif named in _LIKE:
        found = _like(config, _LIKE[named] or _family_of(config, named))
    else:
        found = _by_fields(config, named)
    return replace(found, encoder_weights=sum(_encoder(config.get(name), named or "") for name in _ENCODERS))


def _like(config: Mapping[str, Any], family: str) -> ModelConfig:
    text = dict(text_of(config))
    for name in ("tie_word_embeddings", "dtype", "torch_dtype"):
        # The outer config decides whether the embeddings are tied.
        if (text.get(name) is None or name == "tie_word_embeddings") and config.get(name) is not None:
            text[name] = config[name]
    if "padded_vocab_size" in text:
        text |= {name: text[chatglm_name] for name, chatglm_name in _CHATGLM.items() if chatglm_name in text}
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.get(name)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            # Three-dimensional positions (M-RoPE) change no size.
            text[name] = {**rope, "type": "default", "rope_type": "default"}
    return ModelConfig.from_dict({**text, "architectures": [family]})


def _family_of(config: Mapping[str, Any], named: str) -> str:
    """Return the text model's family, from its architecture or else its model type. `named` is the outer
    architecture."""
    text = text_of(config)
    stated = next((name for name in text.get("architectures") or [] if name in FAMILIES), None)
    kind = str(text.get("model_type") or "")
    families = {family.model_type: name for name, family in FAMILIES.items() if name.endswith("ForCausalLM")}
    if stated is None and kind not in families:
        raise ModelError(f"the weight sizes of {named} are not known for a text model of type {kind or 'unknown'}")
    return stated or families[kind]


def _by_fields(config: Mapping[str, Any], named: str) -> ModelConfig:
    c = Fields(text_of(config), {})
    sizes = _BY_FIELDS[named]
    mixture = sizes.mixture
    strange = next((name for name in _NOT_ATTENTION if c.get(name) is not None), None)
    if strange is not None:
        raise ModelError(
            f"the sizes of {named} with {strange} are not known: its cache holds more than keys and values"
        )
    norm = NormConfig("rms", 1e-6)
    dense = MLPConfig(c.integer(mixture.dense if mixture else "intermediate_size"), "silu", sizes.gated)
    moe = None if mixture is None else _experts(c, mixture)
    kinds = {kind: _attention(c, kind, sizes.bias) for kind in set(_kinds(c))}
    layers = tuple(
        LayerConfig(kinds[kind], dense, moe if mixture is not None and _is_sparse(c, mixture, index) else None)
        for index, kind in enumerate(_kinds(c))
    )
    return ModelConfig(
        architecture=named,
        model_type=str(c.get("model_type") or named),
        vocab_size=c.integer("vocab_size"),
        hidden_size=c.integer("hidden_size"),
        max_position_embeddings=c.integer("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", c.flag("tie_word_embeddings"))),
        dtype=str(c.get("dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        eos_token_ids=(),
        decoder=DecoderConfig(norm, layers),
    )


def _kinds(c: Fields) -> list[str]:
    """Return the type of each layer's attention, as in ``layer_types``."""
    count = c.integer("num_hidden_layers")
    kinds = c.get("layer_types")
    if kinds is None:
        # Every n-th layer has full attention.
        chunked = c.get("attention_chunk_size") is not None
        every = c.get("no_rope_layer_interval") or 4 if chunked else c.get("sliding_window_pattern") or 0
        every = len(every) if isinstance(every, str) else int(every)
        windowed = "chunked_attention" if chunked else "sliding_attention"
        kinds = [windowed if every and (index + 1) % every else "full_attention" for index in range(count)]
    unknown = set(map(str, kinds)) - {"full_attention", *_WINDOWS}
    if unknown or len(kinds) != count:
        raise ModelError(f"the sizes of layers of type {', '.join(sorted(unknown)) or kinds!r} are not known")
    return list(kinds)


def _attention(c: Fields, kind: str, biased: str) -> AttentionConfig:
    heads = c.integer("num_attention_heads")
    kv_heads, size = int(c.get("num_key_value_heads") or heads), int(c.get("head_dim") or 0)
    size = size or c.integer("hidden_size") // heads
    window = c.get(_WINDOWS[kind]) if kind in _WINDOWS else None
    bias = bool(biased) and c.flag(biased)
    seen = None if window is None else int(window)
    return AttentionConfig(heads, kv_heads, size, size**-0.5, sliding_window=seen, qkv_bias=bias, out_bias=bias)


def _experts(c: Fields, mixture: _Mixture) -> MoEConfig:
    """Return the experts of a MoE layer."""
    size = c.integer(mixture.size)
    shared = mixture.always_shared + (c.integer(mixture.shared, lower=0) if c.get(mixture.shared) else 0)
    return MoEConfig(
        c.integer(mixture.count), int(c.get(mixture.per_token) or 1), size, shared_intermediate_size=shared * size
    )


def _is_sparse(c: Fields, mixture: _Mixture, index: int) -> bool:
    """Return whether the layer at `index` is MoE."""
    every, first, last = (c.get(name) for name in (mixture.every, mixture.first, mixture.last))
    last = index if last is None or int(last) < 0 else int(last)
    return int(first or 0) <= index <= last and (index + 1) % int(every or 1) == 0


def _encoder(config: Any, named: str) -> int:
    """Return the approximate number of weight elements of an encoder in a model of architecture `named`."""
    if not isinstance(config, Mapping):
        return 0
    found = Fields(config, {})

    def first(*names: str) -> int:
        value = next((found.get(name) for name in names if isinstance(found.get(name), int | float)), 0)
        return int(value or 0)

    # In Qwen2-VL embed_dim is the width of the blocks, and hidden_size that of the encoder's output.
    hidden, layers = first("embed_dim", "hidden_size", "d_model"), first("num_hidden_layers", "depth", "encoder_layers")
    # In GLM-4V intermediate_size belongs to the merger between encoder and text model.
    glm = str(found.get("model_type")).startswith("glm4v")
    inner = first("out_hidden_size" if glm else "intermediate_size", "encoder_ffn_dim") or int(
        hidden * float(found.get("mlp_ratio") or 4)
    )
    is_gated = found.get("hidden_act") == "silu" or {named, str(found.get("model_type"))} & set(_GATED_ENCODERS)
    matrices = 3 if is_gated else 2
    blocks = layers * (4 * hidden * hidden + matrices * hidden * inner)
    return max(blocks + (0 if glm else _qwen_ends(found, hidden, first)), 0)


def _qwen_ends(found: Fields, hidden: int, first: Callable[..., int]) -> int:
    """Return the number of weight elements outside the blocks of Qwen's encoders; 0 without ``spatial_merge_size``.

    These are the patch and position embeddings, the merger for the text model, and another merger for each block whose
    output the text model also gets (``deepstack``).
    """
    merged = hidden * first("spatial_merge_size") ** 2
    if not merged:
        return 0
    patches = (first("in_channels", "in_chans") or 3) * (first("temporal_patch_size") or 2) * first("patch_size") ** 2
    mergers = 1 + len(found.items("deepstack_visual_indexes", int))
    handed_on = first("out_hidden_size", "hidden_size")
    return hidden * (patches + first("num_position_embeddings")) + mergers * merged * (merged + handed_on)
