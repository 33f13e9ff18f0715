"""Who proposes tokens that may come next, so that one step can verify several (speculative decoding, Leviathan et al.,
2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Proposes drafts. What it proposes changes how fast tokens come, never which."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that may follow `token_ids`, prompt and output of one sequence; none is allowed."""
        ...
