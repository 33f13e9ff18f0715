"""One family, as a description of its parts and of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.weight_layout import Fused
from stoker_engine.architectures.weight_names import WeightNames


@dataclass(frozen=True)
class GGUFFamily:
    """One architecture of GGUF. What the metadata leave out, because llama.cpp knows it of an architecture, is stated
    here.

    Attributes:
        name: GGUF's.
        architecture: ours.
        config: further fields of config.json, from the metadata.
        rotated: queries' and keys' rows are rearranged for neighbouring rotary pairs (`gguf_names`).
        names: the names that differ from the vocabulary.
        fused: the tensors that hold several parameters, beyond those of all families.
        describes: whether it is this family, where several go by one name.
    """

    name: str
    architecture: str
    config: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    rotated: bool = False
    names: Callable[[Metadata], dict[str, str]] = lambda metadata: {}
    fused: Mapping[str, Fused] = field(default_factory=dict)
    describes: Callable[[Metadata], bool] = lambda metadata: True


@dataclass(frozen=True)
class Family:
    """How the configs of one family are read, and what its files call the weights.

    Attributes:
        model_type: transformers' name.
        read: the decoder's parts; raises `ModelError` for an option that we lack.
        defaults: what a config may leave unsaid.
        weight_names: those of safetensors files.
        field_names: names that go before a config field's general one in this family's files.
        gguf: GGUF files of the family; None: these are not read.
    """

    model_type: str
    read: Callable[[Fields], DecoderConfig]
    defaults: Mapping[str, Any]
    weight_names: WeightNames
    field_names: Mapping[str, str] = field(default_factory=dict)
    gguf: GGUFFamily | None = None
