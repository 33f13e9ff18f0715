"""Which tokens a sequence holds and how often, kept from token to token for the penalties."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

_MORE = 256


class TokenCounts:
    """Distinct tokens, and how often the output holds each.

    ::

        tokens   │ the prompt's, ascending │ the output's others, as they came │ (room)
        counts   │ 0  2  0  1  …           │ 1  3  …                           │

    Args:
        prompt: its tokens, or none where a sequence's output alone is asked about.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        tokens = np.unique(np.array(prompt, dtype=np.int64))
        self._num_prompt = self._size = len(tokens)
        self._tokens: Ids = np.append(tokens, np.zeros(_MORE, np.int64))
        self._counts: Ids = np.zeros(len(self._tokens), np.int64)
        self._place: dict[int, int] = {}  # of the output's tokens

    @property
    def tokens(self) -> Ids:
        """[n] the distinct tokens."""
        return self._tokens[: self._size]

    @property
    def counts(self) -> Ids:
        """[n] how often the output holds each of `tokens`; 0 where only the prompt does."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Counts a new token of the output."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._find(token_id)
        self._counts[place] += 1

    def copy(self) -> TokenCounts:
        """The same, for a sequence that goes on from here."""
        other = copy.copy(self)
        other._tokens, other._counts, other._place = self._tokens.copy(), self._counts.copy(), self._place.copy()
        return other

    def _find(self, token_id: int) -> int:
        """The token's place in the prompt's part, or a new one behind everything."""
        place = int(self._tokens[: self._num_prompt].searchsorted(token_id))
        if place < self._num_prompt and self._tokens[place] == token_id:
            return place
        if self._size == len(self._tokens):
            room = np.zeros(max(_MORE, self._size), np.int64)
            self._tokens, self._counts = np.append(self._tokens, room), np.append(self._counts, room)
        self._tokens[self._size] = token_id
        self._size += 1
        return self._size - 1
