"""Finds the accepted part of a draft; `sched.accept_draft` then removes the rest."""

from __future__ import annotations

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled


def verify_draft(drawn: list[Sampled], draft: list[int], errors: list[str | None]) -> Sampled:
    """Return the longest prefix of the draft that equals the sampled tokens, and the token sampled after it; or the
    error or NaN that prevents this.

    Each row was sampled as if the preceding drafted tokens were correct. Draws depend only on seed and position, so the
    output is the same as without a draft.

    Args:
        drawn: result of each row, one more than drafted tokens.
        errors: error of the grammar for each row; None: no error.
    """
    errors = [error or sampled.error for error, sampled in zip(errors, drawn, strict=True)]
    if errors[0] is not None:
        return Sampled([], error=errors[0])
    if not draft:
        return drawn[0]
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for sampled, drafted, error in zip(drawn, [*draft, None], errors, strict=True):
        if error is not None:
            break  # the next step reports it
        if sampled.is_corrupted:
            return sampled
        [[token]] = sampled.token_ids
        tokens.append(token)
        if sampled.logprobs is not None:
            logprobs += sampled.logprobs[0]
        if token != drafted:
            break
    return Sampled([tokens], [logprobs] if logprobs else None)
