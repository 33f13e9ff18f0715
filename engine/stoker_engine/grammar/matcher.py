"""How far one sequence has come in its grammar: a function of the tokens of its output, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher


#: What llguidance says where its lexer has learnt all that it may.
_WORN: Final = "too many states"


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on; the sentence says why."""


class Matcher:
    """The state of one output.

    Args:
        matcher: at the grammar's beginning; it is this one's own.
        begins_after: sequences of tokens, after any of which the grammar begins; empty: at once.
        shared: what other outputs share with this one; None: nothing.

    Attributes:
        num_taken: tokens of the output that are taken in.
        matcher: llguidance's.
        has_begun: whether the grammar has begun; before, any token may come.
    """

    def __init__(self, matcher: LLMatcher, begins_after: Sequence[tuple[int, ...]] = (), shared: object = None) -> None:
        self.matcher = matcher
        self.shared = shared
        self.num_taken = 0
        self.has_begun = not begins_after
        self._begins_after = begins_after
        self._last: tuple[int, ...] = ()  # tokens before it has begun, as many as the longest of `begins_after`
        self._most = max(map(len, begins_after), default=0)

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that come next. One that may not come puts it in error."""
        self.num_taken += len(token_ids)
        for place, token_id in enumerate(token_ids):
            if self.has_begun:
                self.matcher.consume_tokens(list(token_ids[place:]))
                return
            self._last = (*self._last, token_id)[-self._most :]
            self.has_begun = any(self._last[-len(sequence) :] == sequence for sequence in self._begins_after)

    def copy(self) -> Matcher:
        """The same, to go on from here in another way."""
        other = Matcher(self.matcher.deep_copy(), self._begins_after, self.shared)
        other.num_taken, other.has_begun, other._last = self.num_taken, self.has_begun, self._last
        return other

    @property
    def is_worn(self) -> bool:
        """Whether it cannot go on for what others have done to what they share."""
        return self.shared is not None and self.matcher.is_error() and _WORN in self.matcher.get_error()

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None: it can, or has come to its end."""
        if not self.matcher.is_error():
            return None
        return f"the grammar cannot go on after {self.num_taken} tokens: {first_line(self.matcher.get_error())}"


def first_line(error: str) -> str:
    """What went wrong, of an error of llguidance's: without the state of its parser."""
    return error.partition("\n")[0]
