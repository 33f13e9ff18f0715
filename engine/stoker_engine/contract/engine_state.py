"""How an engine of the model does: what the server answers at ``/copies``, and what the operator reads there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class EngineState:
    """One engine of the model.

    Attributes:
        number: which, from 0; the label ``engine`` of its metrics.
        serves: it answers requests.
        ranks: processes that share it.
        missing_ranks: those of them that have not loaded their part, or have ended, in order.
        message: a sentence on what it does, or of what it died.
        kv_blocks: blocks of its KV cache; None: it was never loaded.
        kv_tokens: tokens of the longest sequences that these hold; None: it was never loaded.
    """

    number: int
    serves: bool
    ranks: int = 1
    missing_ranks: tuple[int, ...] = ()
    message: str = ""
    kv_blocks: int | None = None
    kv_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, reported: Any) -> EngineState | None:
        """Reads what `to_dict` wrote; None where others did. Fields of later versions are left out."""
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
