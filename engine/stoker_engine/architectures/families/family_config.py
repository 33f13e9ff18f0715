"""One family, as a description of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig


@dataclass(frozen=True)
class FamilyConfig:
    """How the configs of one family are read.

    Attributes:
        model_type: transformers' name.
        read: the decoder's parts; raises `ModelError` for an option that we lack.
        defaults: what a file may leave unsaid.
        names: names that go before a field's general one in this family's files.
    """

    model_type: str
    read: Callable[[Fields], DecoderConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
