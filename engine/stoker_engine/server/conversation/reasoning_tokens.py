"""Count of an answer's reasoning tokens."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_engine.server.parsers.parts import Part, Reasoning


class ReasoningTokens:
    """Counts the reasoning tokens of one sequence, including markers, however they are split into deltas.

    Args:
        ends: token sequences after any of which the answer begins.
        is_reasoning: whether the output may begin with reasoning.
    """

    def __init__(self, ends: Sequence[Sequence[int]], is_reasoning: bool) -> None:
        self.count = 0
        self._ends = [tuple(end) for end in ends if end]
        self._is_over = not is_reasoning
        self._seen = 0  # number of tokens
        self._last: list[int] = []  # the last tokens, as many as may begin an end sequence
        self._has_any = False

    def add(self, token_ids: Sequence[int], parts: Sequence[Part], is_reasoning: bool) -> None:
        """Add a delta: its tokens, its parts, and whether it ends before the answer."""
        if self._is_over:
            return
        window = [*self._last, *token_ids]
        begin = self._seen - len(self._last)
        self._seen += len(token_ids)
        found = [end_index for end in self._ends if (end_index := _end_of(end, window)) is not None]
        self._has_any = self._has_any or bool(found) or any(isinstance(part, Reasoning) for part in parts)
        # The tokens of the end are counted immediately, although the parser may need more text to detect the answer.
        self._is_over = bool(found) or not is_reasoning
        if found:
            self.count = begin + min(found)
        else:
            self.count = self._seen if self._has_any else 0
        longest = max(map(len, self._ends), default=1)
        self._last = window[max(0, len(window) - longest + 1) :]


def _end_of(part: tuple[int, ...], whole: Sequence[int]) -> int | None:
    """Return the end index of the first occurrence of `part` in `whole`, or None."""
    for end in range(len(part), len(whole) + 1):
        if tuple(whole[end - len(part) : end]) == part:
            return end
    return None
