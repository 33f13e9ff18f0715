"""Description of a family: its decoder's parts and its files."""

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
    """One architecture of GGUF, including facts that its metadata omit because they are built into llama.cpp.

    Attributes:
        name: GGUF's name of the architecture.
        architecture: the corresponding name in config.json's ``architectures``.
        config: returns fields of config.json to add or replace, from the metadata.
        rotated: whether llama.cpp's converter reorders the rows of queries and keys to adjacent rotary pairs
            (`gguf_names`).
        names: returns the weights' names that differ from those in `gguf_names`: Stoker's name → file's name.
        fused: tensors with several parameters, in addition to those that `gguf_names` lists for all families.
        describes: returns whether a file belongs to this family, if several families share the GGUF name.
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
    """One family: how to read its configs, and the names of its weights.

    Attributes:
        model_type: transformers' ``model_type``.
        read: returns the decoder's parts; raises `ModelError`.
        defaults: values of config fields that may be omitted.
        weight_names: names of weights in safetensors files.
        field_names: general name of a config field → the family's own name, which takes precedence.
        gguf: the family's GGUF architecture; None: it has none of its own.
    """

    model_type: str
    read: Callable[[Fields], DecoderConfig]
    defaults: Mapping[str, Any]
    weight_names: WeightNames
    field_names: Mapping[str, str] = field(default_factory=dict)
    gguf: GGUFFamily | None = None
