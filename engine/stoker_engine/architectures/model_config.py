"""Shape of a model, read from its ``config.json`` without importing torch or transformers.

Both common spellings are supported: the hub's older one (``rope_theta``, ``rope_scaling``, ``n_embd``,
``torch_dtype``) and transformers 5's (``rope_parameters``, ``layer_types``, ``dtype``). Of a multimodal config,
``text_config`` is read. The outer config's ``eos_token_id`` takes precedence, and its dtype is used if ``text_config``
has none. `architectures.families` defines each family's defaults and the parts of its decoder.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures.checkpoint_files import Folder, complete_config
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, LayerConfig
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.no_decoder import NAME_ONE, NO_ARCHITECTURES, why_no_decoder
from stoker_engine.architectures.rope_config import RopeParameters
from stoker_engine.contract.json_file import read_json_object

__all__ = ["LayerConfig", "ModelConfig", "RopeParameters"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only language model; names are those of ``config.json``.

    Attributes:
        max_position_embeddings: as the config states it: the context length before or after RoPE scaling, depending on
            the family.
        dtype: the dtype that the config states, as spelled there; ``float32`` if it states none.
        decoder: parts of the decoder.
        num_weights: number of weight elements, if they cannot be counted from the parts (Transformers backend);
            otherwise None.
        encoder_weights: number of weight elements of an image or audio encoder. The planner counts them for runtimes
            that load the encoder, assuming that every device holds all of them.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    decoder: DecoderConfig = field(repr=False)
    num_weights: int | None = None
    encoder_weights: int = 0

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The decoder layers, in order."""
        return self.decoder.layers

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads of the first layer."""
        return self.layers[0].attention.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of cached key and value heads of the first layer."""
        return self.layers[0].attention.cache.num_kv_heads

    @property
    def num_experts(self) -> int:
        """Number of routed experts of the first mixture-of-experts layer; 0: there is none."""
        return next((layer.moe.num_experts for layer in self.layers if layer.moe is not None), 0)

    @property
    def head_dim(self) -> int:
        """Size of a cached key head of the first layer."""
        return self.layers[0].attention.cache.head_dim

    @property
    def intermediate_size(self) -> int:
        """Inner size of the widest MLP or mixture of experts; a mixture counts the experts of one token."""
        return max(_inner_size(layer) for layer in self.layers)

    @property
    def longest_model_len(self) -> int:
        """Maximum ``--max-model-len`` in tokens: the context length after RoPE scaling, as in vLLM. YaRN scales the
        original length."""
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        yarn = next((rope for rope in ropes if rope.rope_type == "yarn"), None)
        if yarn is not None and not self.model_type.startswith("gemma3"):
            return int(yarn.original_max_position_embeddings * max(yarn.factor, 1.0))
        stretched = max((rope.factor for rope in ropes if rope.rope_type in ("linear", "dynamic")), default=1.0)
        if self.model_type.startswith("gemma3"):
            stretched = 1.0  # max_position_embeddings already is the scaled length
        return int(self.max_position_embeddings * stretched)

    @property
    def default_model_len(self) -> int:
        """Default of ``--max-model-len`` in tokens.

        With ``longrope`` and ``dynamic`` it is at most the original length: a larger limit would also change the
        results of short sequences (`layers.rotary`).
        """
        for layer in self.layers:
            if layer.rope is not None and layer.rope.rope_type in ("longrope", "dynamic"):
                return min(layer.rope.original_max_position_embeddings, self.longest_model_len)
        return self.longest_model_len

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed ``config.json`` of either spelling.

        Raises:
            ModelError: the model is not supported, or a field is missing or invalid.
        """
        top = Fields(config, {})
        architectures = top.items("architectures", str)
        architecture = next((name for name in architectures if name in FAMILIES), None)
        if not architectures:
            raise ModelError(f"{NO_ARCHITECTURES}; {NAME_ONE}")
        if architecture is None:
            reason = why_no_decoder(config)
            raise ModelError(
                f"architecture {', '.join(architectures)} is not supported"
                + (f": {reason}" if reason else f"; supported are {', '.join(sorted(FAMILIES))}")
            )
        family = FAMILIES[architecture]
        text = dict(top.object("text_config") or config)
        for name in ("eos_token_id", "dtype", "torch_dtype"):
            if text.get(name) is None:
                text.pop(name, None)
                if config.get(name) is not None:
                    text[name] = config[name]
        if config.get("eos_token_id") is not None:
            text["eos_token_id"] = config["eos_token_id"]
        c = Fields(text, family.defaults, family.field_names)
        vocab_size = c.integer("vocab_size")
        return cls(
            architecture=architecture,
            model_type=family.model_type,
            vocab_size=vocab_size,
            hidden_size=c.integer("hidden_size"),
            max_position_embeddings=c.integer("max_position_embeddings"),
            tie_word_embeddings=c.flag("tie_word_embeddings"),
            dtype=c.text("dtype") if c.get("dtype") else "float32",
            eos_token_ids=eos_token_ids(c, vocab_size),
            decoder=family.read(c),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of `folder`, with the end-of-sequence tokens that ``generation_config.json`` states, and
    complete it from other files (`checkpoint_files`).

    Raises:
        ModelError: config.json is missing, or one of the files is invalid.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is an adapter (adapter_config.json), not a model; "
            "merge it into its base model first (PEFT's merge_and_unload, then save_pretrained)"
        )
    config = _read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            config["eos_token_id"] = generation["eos_token_id"]
    return complete_config(config, Folder(folder))


def _inner_size(layer: LayerConfig) -> int:
    moe = layer.moe
    if moe is None:
        return layer.mlp.size
    return moe.num_experts_per_tok * moe.intermediate_size + moe.shared_intermediate_size


def eos_token_ids(c: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence tokens, stated as one id or a list. Ids outside the vocabulary are dropped, because
    they are never generated.

    Raises:
        ModelError: the field is invalid.
    """
    stated = c.get("eos_token_id")
    ids = c.items("eos_token_id", int) if isinstance(stated, list | tuple) else [c.optional_integer("eos_token_id")]
    if any(token is not None and token < 0 for token in ids):
        raise ModelError(f"config.json: eos_token_id must be a token id or a list of them, not {reprlib.repr(stated)}")
    return tuple(token for token in ids if token is not None and token < vocab_size)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise ModelError(f"no {path.name} in {path.parent}; is this a Hugging Face model folder?") from None
