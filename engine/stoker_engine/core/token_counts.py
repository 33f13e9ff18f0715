"""Which tokens a sequence holds and how often, kept from token to token for the penalties."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable


class TokenCounts:
    """Distinct tokens, and how often the output holds each.

    ::

        tokens   │ the prompt's  │ the output's others, as they came
        counts   │ 0  2  0  1  … │ 1  3  …

    Args:
        prompt: its tokens, or none where a sequence's output alone is asked about.

    Attributes:
        tokens: int64, the distinct tokens.
        counts: int64, how often the output holds each of them; 0 where only the prompt does.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens = array("q", dict.fromkeys(prompt))
        self.counts = array("q", bytes(8 * len(self.tokens)))
        self._index = {token: index for index, token in enumerate(self.tokens)}

    def add(self, token_id: int) -> None:
        """Counts a new token of the output."""
        index = self._index.setdefault(token_id, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token_id)
            self.counts.append(0)
        self.counts[index] += 1

    def copy(self) -> TokenCounts:
        """The same, for a sequence that goes on from here."""
        counts = copy.copy(self)
        counts.tokens, counts.counts, counts._index = self.tokens[:], self.counts[:], self._index.copy()
        return counts
