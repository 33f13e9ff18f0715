"""Interface of draft proposers for speculative decoding (Leviathan et al., 2023): one step verifies several proposed
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Proposes drafts. Drafts change the speed of generation, never its output."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow `token_ids` (prompt and output of a sequence). An empty
        list: no draft."""
        ...
