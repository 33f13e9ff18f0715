"""Tokens → text, a token at a time.

A token alone has no text: a character may be spread over several tokens, and SentencePiece drops the space
before the first word. So each new token is decoded together with a few before it, and only what that adds to
the text is new. Text that ends in U+FFFD (an incomplete character) waits for its next token.

        … already told │ context │ new …
                  prefix^        ^read
"""

from __future__ import annotations

from typing import Protocol

#: Prompt tokens that the first new token is decoded with.
_CONTEXT = 5


class Decoding(Protocol):
    """Whatever decodes token ids."""

    def decode(self, token_ids: list[int]) -> str:
        """`token_ids` as text."""
        ...


class IncrementalDetokenizer:
    """The text of one growing sequence. The deltas joined are the whole text."""

    def __init__(self, tokenizer: Decoding, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt_token_ids[-_CONTEXT:]
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """What is left when no more tokens come, incomplete characters as U+FFFD."""
        text = self._new_text()
        self._prefix, self._read = self._read, len(self._ids)
        return text

    def _new_text(self) -> str:
        told = self._tokenizer.decode(self._ids[self._prefix : self._read])
        return self._tokenizer.decode(self._ids[self._prefix :])[len(told) :]
