"""A model's shape, read from its ``config.json`` without importing torch or transformers.

Two spellings are in the wild and both are read: the hub's (``rope_theta``, ``rope_scaling``,
``rope_local_base_freq``, ``sliding_window_pattern``, ``torch_dtype``) and transformers 5's
(``rope_parameters``, ``layer_types``, ``dtype``). A multimodal config is read through its ``text_config``.

config.json leaves out whatever equals the family's default, so each family's defaults are stated here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stoker_engine.contract.errors import ModelError


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer: base frequency and how it is stretched.

    Attributes:
        rope_type: ``default``, ``linear`` or ``llama3``.
        rope_theta: the base.
        factor: how far the context is stretched.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: of ``llama3``.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """What one decoder layer needs of the KV cache and of the positions.

    Attributes:
        sliding_window: the layer sees this many tokens back, itself included; None sees all.
        rope: its rotary embedding.
    """

    sliding_window: int | None
    rope: RopeParameters


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only language model; names are those of ``config.json``."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None
    attn_logit_softcapping: float | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerConfig, ...] = field(repr=False)

    @property
    def num_hidden_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads ``config.json`` (and the end tokens of ``generation_config.json``) from `folder`.

        Raises:
            ModelError: no readable config.json, or a model this engine does not serve.
        """
        config = _read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
            if generation.get("eos_token_id") is not None:
                config["eos_token_id"] = generation["eos_token_id"]
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed ``config.json`` of either spelling.

        Raises:
            ModelError: not a model this engine serves, or a field is missing; the message says which.
        """
        architectures = config.get("architectures") or []
        architecture = next((name for name in architectures if name in FAMILY_DEFAULTS), None)
        if architecture is None:
            raise ModelError(
                f"architecture {', '.join(architectures) or 'unknown'} is not supported; "
                f"supported are {', '.join(sorted(FAMILY_DEFAULTS))}"
            )
        quantized = config.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
            raise ModelError(
                f"the checkpoint is quantized ({method}), which is not supported; use the unquantized model"
            )
        end_tokens = config.get("eos_token_id")
        text = dict(config.get("text_config") or config)
        if end_tokens is not None:
            text["eos_token_id"] = end_tokens
        text.setdefault("dtype", text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
        given = {key: value for key, value in text.items() if value is not None}
        get = {**FAMILY_DEFAULTS[architecture], **given}
        if get.get("use_bidirectional_attention"):
            raise ModelError("use_bidirectional_attention: this is an encoder, not an autoregressive decoder")
        try:
            heads = int(get["num_attention_heads"])
            head_dim = int(get.get("head_dim") or get["hidden_size"] // heads)
            return cls(
                architecture=architecture,
                model_type=str(get["model_type"]),
                vocab_size=int(get["vocab_size"]),
                hidden_size=int(get["hidden_size"]),
                intermediate_size=int(get["intermediate_size"]),
                num_attention_heads=heads,
                num_key_value_heads=int(get.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                max_position_embeddings=int(get["max_position_embeddings"]),
                rms_norm_eps=float(get["rms_norm_eps"]),
                hidden_act=str(get.get("hidden_activation") or get["hidden_act"]),
                tie_word_embeddings=bool(get["tie_word_embeddings"]),
                attention_bias=bool(get["attention_bias"]),
                mlp_bias=bool(get["mlp_bias"]),
                query_pre_attn_scalar=float(get.get("query_pre_attn_scalar") or head_dim),
                final_logit_softcapping=get.get("final_logit_softcapping"),
                attn_logit_softcapping=get.get("attn_logit_softcapping"),
                dtype=str(get.get("dtype") or "float32"),
                eos_token_ids=_token_ids(get.get("eos_token_id")),
                layers=_layers(get),
            )
        except KeyError as missing:
            raise ModelError(f"config.json has no {missing.args[0]!r}") from None


_COMMON: Final = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_LLAMA: Final = {**_COMMON, "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 2048}
_GEMMA3: Final = {
    **_COMMON,
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
}

#: What a config.json of each architecture may leave unsaid.
FAMILY_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": _LLAMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


def _layers(get: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    count = int(get["num_hidden_layers"])
    kinds = get.get("layer_types")
    if kinds is None:
        pattern = get.get("sliding_window_pattern")  # every pattern-th layer sees everything
        kinds = [
            "sliding_attention" if pattern and (index + 1) % pattern else "full_attention" for index in range(count)
        ]
    if len(kinds) != count:
        raise ModelError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}")
    return tuple(
        LayerConfig(
            sliding_window=int(get["sliding_window"]) if kind == "sliding_attention" else None,
            rope=_rope(get, kind),
        )
        for kind in kinds
    )


def _rope(get: Mapping[str, Any], kind: str) -> RopeParameters:
    """The rotary parameters of a layer of `kind`, from whichever spelling is there."""
    given: Mapping[str, Any]
    parameters = get.get("rope_parameters")
    if parameters is not None and (kind in parameters or "full_attention" in parameters):
        given = parameters.get(kind) or {}  # one set a kind of layer
    elif parameters is not None:
        given = parameters
    elif kind == "sliding_attention" and "rope_local_base_freq" in get:
        given = {"rope_theta": get["rope_local_base_freq"]}  # local layers are never stretched
    else:
        given = get.get("rope_scaling") or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ("default", "linear", "llama3"):
        raise ModelError(f"rope type {rope_type!r} is not supported; supported are default, linear, llama3")
    return RopeParameters(
        rope_type=rope_type,
        rope_theta=float(given.get("rope_theta") or get["rope_theta"]),
        factor=float(given.get("factor") or 1.0),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=int(given.get("original_max_position_embeddings") or 0),
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"no {path.name} in {path.parent}; is this a Hugging Face model folder?") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return loaded
