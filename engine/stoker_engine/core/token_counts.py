"""Counts of a sequence's tokens for the penalties, updated token by token."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable


class TokenCounts:
    """Distinct tokens, and the number of times each occurs in the output.

    ::

        tokens   │ of the prompt │ others of the output, in order of first occurrence
        counts   │ 0  2  0  1  … │ 1  3  …

    Args:
        prompt: tokens of the prompt; empty if only the output is counted.

    Attributes:
        tokens: int64, the distinct tokens.
        counts: int64, number of times each occurs in the output; 0 for tokens of the prompt only.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens = array("q", dict.fromkeys(prompt))
        self.counts = array("q", bytes(8 * len(self.tokens)))
        self._index = {token: index for index, token in enumerate(self.tokens)}

    def add(self, token_id: int) -> None:
        """Count a new token of the output."""
        index = self._index.setdefault(token_id, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token_id)
            self.counts.append(0)
        self.counts[index] += 1

    def copy(self) -> TokenCounts:
        """Return a copy for a forked sequence."""
        counts = copy.copy(self)
        counts.tokens, counts.counts, counts._index = self.tokens[:], self.counts[:], self._index.copy()
        return counts
