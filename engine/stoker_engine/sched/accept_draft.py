"""Verification of drafts (speculative decoding, Leviathan et al., 2023).

Each drafted token is computed behind the last known one, and each position is sampled as if the draft before it held.
The longest part of the draft that was sampled as well is accepted, with the token that follows it; the runner has
found it (`exec.finish.verify_draft`, `Sampled.token_ids`). Draws depend on (seed, position) alone, so a draft
changes no output.
"""

from __future__ import annotations

from stoker_engine.core.request import Sequence
from stoker_engine.core.step import Sampled


def accept_draft(sequence: Sequence, num_drafted: int, drawn: Sampled) -> None:
    """Takes back what was computed of drafted tokens that did not hold.

    Args:
        num_drafted: tokens of the draft, all of which the step computed.
        drawn: the accepted tokens and the one after them.
    """
    [held] = drawn.token_ids
    sequence.num_computed -= num_drafted - (len(held) - 1)
    sequence.num_launched = sequence.num_computed
