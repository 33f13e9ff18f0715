"""How far one sequence has come in its grammar: a function of the tokens of its output, kept from step to step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


#: What llguidance says where its lexer has learnt all that it may.
_WORN: Final = "too many states"


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on; the sentence says why."""


#: Most bytes of what a grammar begins after.
_LONGEST: Final = 512


class Beginning:
    """Finds where a grammar begins, in the text of an output: the same text may come in many ways as tokens.

    Args:
        pattern: what it begins after; see `StructuredOutputs.begins_after`.
    """

    def __init__(self, pattern: str, tokenizer: LLTokenizer) -> None:
        self._pattern = re.compile(pattern.encode())
        self._tokenizer = tokenizer

    def add(self, before: bytes, token_id: int) -> tuple[bytes, bytes | None]:
        """The end of a text with one more token, and what of that comes after the match; None: there is none."""
        text = before + self._tokenizer.decode_bytes([token_id])
        found = self._pattern.search(text)
        return text[-_LONGEST:], None if found is None else text[found.end() :]

    def tokens(self, text: bytes) -> list[int]:
        """Some tokens that spell a text."""
        return self._tokenizer.greedy_tokenize(text.decode(errors="replace"))


class Matcher:
    """The state of one output.

    Args:
        matcher: at the grammar's beginning; it is this one's own.
        beginning: finds where the grammar begins; None: at once.
        shared: what other outputs share with this one; None: nothing.

    Attributes:
        num_consumed: tokens of the output that are taken in.
        matcher: llguidance's.
        has_started: whether the grammar has started; before, any token may come.
    """

    def __init__(self, matcher: LLMatcher, beginning: Beginning | None = None, shared: object = None) -> None:
        self.matcher = matcher
        self.shared = shared
        self.num_consumed = 0
        self.has_started = beginning is None
        self._beginning = beginning
        self._before = b""  # the end of the text before it has started

    def consume(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that come next. One that may not come puts it in error.

        A token may hold the end of what the grammar begins after, and more: whitespace is free then as well, anything
        else is the grammar's.
        """
        self.num_consumed += len(token_ids)
        for index, token_id in enumerate(token_ids):
            if self._beginning is None or self.has_started:
                self.matcher.consume_tokens(list(token_ids[index:]))
                return
            self._before, after = self._beginning.add(self._before, token_id)
            if after is not None:
                self.has_started = True
                if after := after.lstrip():
                    self.matcher.consume_tokens(self._beginning.tokens(after))

    def copy(self) -> Matcher:
        """The same, to go on from here in another way."""
        copied = Matcher(self.matcher.deep_copy(), self._beginning, self.shared)
        copied.num_consumed, copied.has_started, copied._before = self.num_consumed, self.has_started, self._before
        return copied

    @property
    def is_worn(self) -> bool:
        """Whether it cannot go on for what others have done to what they share."""
        return self.shared is not None and self.matcher.is_error() and _WORN in self.matcher.get_error()

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None: it can, or has come to its end."""
        if not self.matcher.is_error():
            return None
        return f"the grammar cannot go on after {self.num_consumed} tokens: {first_line(self.matcher.get_error())}"


def first_line(error: str) -> str:
    """What went wrong, of an error of llguidance's: without the state of its parser."""
    return error.partition("\n")[0]
