"""State of one engine, as the server reports it at ``/copies`` and the operator reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class EngineState:
    """State of one engine of the model.

    Attributes:
        number: index of the engine, from 0; the label ``engine`` of its metrics.
        serves: whether the engine answers requests.
        ranks: number of the engine's ranks.
        missing_ranks: sorted ranks that have not loaded yet, or have ended.
        message: what the engine does, or why it does not serve.
        kv_blocks: number of KV cache blocks; None if the engine was never loaded.
        kv_tokens: number of tokens that fit into these blocks in sequences of maximum length; None if the engine was
            never loaded.
    """

    number: int
    serves: bool
    ranks: int = 1
    missing_ranks: tuple[int, ...] = ()
    message: str = ""
    kv_blocks: int | None = None
    kv_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, reported: Any) -> EngineState | None:
        """Parse the result of `to_dict`, ignoring fields of later versions; None for anything else."""
        if not isinstance(reported, Mapping):
            return None
        fields = {field.name: reported[field.name] for field in dataclasses.fields(cls) if field.name in reported}
        missing = fields.get("missing_ranks", ())
        if not isinstance(missing, list | tuple):
            return None
        state_of = fields | {"missing_ranks": tuple(missing)}
        whole = (state_of.get("number"), state_of.get("ranks", 1), *missing)
        optional = (state_of.get("kv_blocks"), state_of.get("kv_tokens"))
        right = (
            all(_is_number(each) for each in whole)
            and all(each is None or _is_number(each) for each in optional)
            and isinstance(state_of.get("serves"), bool)
            and isinstance(state_of.get("message", ""), str)
        )
        return cls(**state_of) if right else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
