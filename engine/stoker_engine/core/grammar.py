"""A compiled grammar, on its way to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: Why a model takes no grammars that has no end-of-sequence token.
NO_END: Final = (
    "this model has no end-of-sequence token, so an output that is complete could not end; structured_outputs needs "
    "one (eos_token_id in its config.json)"
)


@dataclass(frozen=True)
class Grammar:
    """What the tokens of an output must spell.

    Attributes:
        source: the grammar as llguidance serialises it, checked.
        begins_after: see `StructuredOutputs`.
        compiled: what `grammar.grammars` made of it, held for as long as somebody may begin with it; None: nothing yet.
    """

    source: str
    begins_after: str | None = None
    compiled: object = field(default=None, compare=False, repr=False)
