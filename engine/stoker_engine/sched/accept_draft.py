"""Verification of drafts (speculative decoding, Leviathan et al., 2023).

A step computes the drafted tokens after the last known one, and samples each position as if the drafted tokens before
it were correct. The longest prefix of the draft that equals the sampled tokens is accepted, plus the token sampled
after it. The runner finds this prefix (`exec.finish.verify_draft`, `Sampled.token_ids`). Random numbers depend on
(seed, position) alone, so a draft changes no output.
"""

from __future__ import annotations

from stoker_engine.core.request import Sequence
from stoker_engine.core.step import Sampled


def accept_draft(sequence: Sequence, num_drafted: int, drawn: Sampled) -> None:
    """Subtract the rejected tokens of a draft from the sequence's computed tokens.

    Args:
        num_drafted: number of drafted tokens, all computed by the step.
        drawn: the accepted tokens and the one sampled after them.
    """
    [held] = drawn.token_ids
    sequence.num_computed -= num_drafted - (len(held) - 1)
    sequence.num_launched = sequence.num_computed
