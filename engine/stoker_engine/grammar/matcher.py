"""The state of one sequence in its grammar, determined by its output tokens and updated at each step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


#: Part of llguidance's error when the number of lexer states reaches its limit.
_WORN: Final = "too many states"


class GrammarError(Exception):
    """A grammar cannot be compiled, or an output cannot continue. The message says why."""


#: Number of bytes of the output's text that are kept to find a match of `begins_after` that spans several tokens.
_LONGEST: Final = 512


class Beginning:
    """Finds the start of a grammar in an output's text, because tokens can spell the same text in several ways.

    Args:
        pattern: regular expression after whose match the grammar starts; see `StructuredOutputs.begins_after`.
    """

    def __init__(self, pattern: str, tokenizer: LLTokenizer) -> None:
        self._pattern = re.compile(pattern.encode())
        self._tokenizer = tokenizer

    def add(self, before: bytes, token_id: int) -> tuple[bytes, bytes | None]:
        """Append a token to a text. Return the last bytes of the text, and the text after the pattern's match (None
        if there is no match)."""
        text = before + self._tokenizer.decode_bytes([token_id])
        found = self._pattern.search(text)
        return text[-_LONGEST:], None if found is None else text[found.end() :]

    def tokens(self, text: bytes) -> list[int]:
        """Return tokens that spell a text."""
        return self._tokenizer.greedy_tokenize(text.decode(errors="replace"))


class Matcher:
    """The state of one output in its grammar.

    Args:
        matcher: llguidance's matcher in its initial state, not shared with other outputs.
        beginning: finds the start of the grammar; None: the output starts with it.
        shared: the compiled grammar whose lexer states this matcher shares with others; None: it shares none.

    Attributes:
        has_started: whether the grammar has started; before that, all tokens are allowed.
    """

    def __init__(self, matcher: LLMatcher, beginning: Beginning | None = None, shared: object = None) -> None:
        self.matcher = matcher
        self.shared = shared
        self.num_consumed = 0
        self.has_started = beginning is None
        self._beginning = beginning
        self._before = b""  # the end of the text before the grammar starts

    def consume(self, token_ids: Sequence[int]) -> None:
        """Consume the next tokens. A token that is not allowed sets `error`.

        A token may contain the end of the match of `begins_after` and additional text. The grammar ignores leading
        whitespace of that text, and consumes the remainder.
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
        """Return a copy, which shares no state except that of `shared`."""
        copied = Matcher(self.matcher.deep_copy(), self._beginning, self.shared)
        copied.num_consumed, copied.has_started, copied._before = self.num_consumed, self.has_started, self._before
        return copied

    @property
    def is_worn(self) -> bool:
        """Whether the matcher cannot continue because the shared lexer states have reached their limit."""
        return self.shared is not None and self.matcher.is_error() and _WORN in self.matcher.get_error()

    @property
    def error(self) -> str | None:
        """Why the output cannot continue; None: it can, or is complete."""
        if not self.matcher.is_error():
            return None
        return f"the grammar cannot continue after {self.num_consumed} tokens: {first_line(self.matcher.get_error())}"


def first_line(error: str) -> str:
    """Return llguidance's error without the state of its parser."""
    return error.partition("\n")[0]
