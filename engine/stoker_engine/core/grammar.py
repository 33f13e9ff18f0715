"""A compiled grammar, on its way to the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grammar:
    """What the tokens of an output must spell.

    Attributes:
        source: the grammar as llguidance serialises it, checked.
        begins_after: sequences of tokens, after any of which in the output it begins; empty: at once.
    """

    source: str
    begins_after: tuple[tuple[int, ...], ...] = ()
