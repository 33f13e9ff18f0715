"""One architecture of GGUF, as a description of how its files differ from others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.weight_layout import Fused


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
