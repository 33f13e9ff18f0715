"""The text of a growing sequence, emitted as soon as it can no longer change.

An output's text is decode(prompt + output) without the leading decode(prompt). If the prompt ends inside a character,
the output's first text is that character.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from stoker_engine.tokens.piece_decoders import PieceDecoder, write_through

#: Number of prompt tokens that the decoder gets as context. A character has fewer bytes.
_CONTEXT = 8


class Decoding(Protocol):
    """The methods of a tokenizer that the detokenizer needs."""

    def piece_decoders(self) -> list[PieceDecoder]:
        """Return new piece decoders in their initial state."""
        ...

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the spelling of a token; None if it has no text: special and skipped, or unknown."""
        ...


class IncrementalDetokenizer:
    """The text of one sequence. The joined deltas equal the whole text; the cost per token is constant."""

    def __init__(
        self,
        tokenizer: Decoding,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible: Container[int] = (),
    ) -> None:
        """
        Args:
            visible: ids of special tokens that are never skipped.
        """
        self._token = tokenizer.token
        self._decoders = tokenizer.piece_decoders()
        self._skip = skip_special_tokens
        self._visible = visible
        for token in self._context(prompt_token_ids):
            write_through(self._decoders, [token])
        for decoder in self._decoders:
            decoder.mark_emitted()

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        token = self._token(token_id, self._skip and token_id not in self._visible)
        return "" if token is None else write_through(self._decoders, [token])

    def flush(self) -> str:
        """Return the remaining text after the last token, with incomplete characters as U+FFFD. Call once."""
        decoders = self._decoders
        return "".join(write_through(decoders[index:], decoder.end()) for index, decoder in enumerate(decoders, 1))

    def _context(self, prompt: Sequence[int]) -> list[str]:
        """Return the last tokens of the prompt that have text."""
        context: list[str] = []
        for token_id in reversed(prompt):
            token = self._token(token_id, self._skip and token_id not in self._visible)
            if token is not None:
                context.append(token)
                if len(context) == _CONTEXT:
                    break
        return context[::-1]
