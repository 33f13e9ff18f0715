"""How much of a draft holds; `sched.accept_draft` then takes back what does not."""

from __future__ import annotations

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled


def verify_draft(drawn: list[Sampled], draft: list[int], errors: list[str | None]) -> Sampled:
    """What the sequence gets of a draft: the tokens that the model drew as well, and the one that it drew after them.

    Each row was sampled as if the draft before it held. Since a draw depends on nothing but seed and position, what
    comes out is what would have come out without any draft.

    Args:
        drawn: of each row, one more than the draft has tokens.
        errors: why there is no next token, by the row's grammar.
    """
    if errors[0] is not None:
        return Sampled([], error=errors[0])
    if not draft:
        return drawn[0]
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for sampled, drafted, error in zip(drawn, [*draft, None], errors, strict=True):
        if error is not None:
            break  # which the next step finds, too
        if sampled.is_corrupted:
            return sampled
        [[token]] = sampled.token_ids
        tokens.append(token)
        if sampled.logprobs is not None:
            logprobs += sampled.logprobs[0]
        if token != drafted:
            break
    return Sampled([tokens], [logprobs] if logprobs else None)
