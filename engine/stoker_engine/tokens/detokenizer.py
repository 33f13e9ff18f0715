"""The text of a growing sequence, emitted as soon as it can no longer change.

The text of an output is what it adds to the prompt's: decode(prompt + output) without decode(prompt). Where the
prompt ends inside a character, the output's first text is that character.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from stoker_engine.tokens.piece_decoders import PieceDecoder, write_through

#: Prompt tokens that show the decoder where it stands: more than a character has bytes.
_CONTEXT = 8


class Decoding(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def piece_decoders(self) -> list[PieceDecoder]:
        """Fresh streams of the tokenizer's decoders."""
        ...

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The string of a token; None where it has no text: special and skipped, or unknown."""
        ...


class IncrementalDetokenizer:
    """The text of one sequence. The deltas joined are the whole text; each token costs the same."""

    def __init__(
        self,
        tokenizer: Decoding,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible: Container[int] = (),
    ) -> None:
        """
        Args:
            visible: special tokens that are part of the text all the same.
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
        """The text that `token_id` completes; empty while a character is incomplete."""
        token = self._token(token_id, self._skip and token_id not in self._visible)
        return "" if token is None else write_through(self._decoders, [token])

    def flush(self) -> str:
        """What is left when no more tokens come, incomplete characters as U+FFFD. Call once."""
        decoders = self._decoders
        return "".join(write_through(decoders[index:], decoder.end()) for index, decoder in enumerate(decoders, 1))

    def _context(self, prompt: Sequence[int]) -> list[str]:
        """The last tokens of the prompt that have text."""
        context: list[str] = []
        for token_id in reversed(prompt):
            token = self._token(token_id, self._skip and token_id not in self._visible)
            if token is not None:
                context.append(token)
                if len(context) == _CONTEXT:
                    break
        return context[::-1]
