"""The part of a tokenizer that decodes: small, quick to pickle, and without the encoder.

The encoder takes seconds to load and holds the GIL meanwhile, so it runs in another process (`tokenizer_process`). The
server keeps only this part, which every generated token needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_common.errors import RequestError
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.tokens.detokenizer import IncrementalDetokenizer
from stoker_engine.tokens.piece_decoders import ByteLevel, PieceDecoder, byte_level_bytes, fallback_byte, piece_decoders
from stoker_engine.tokens.token_bytes import token_table


@dataclass(eq=False)
class Vocabulary:
    """The tokens of a model as text. Thread-safe.

    Attributes:
        tokens: the spelling of each id (``Ġthe``, ``▁the``); None for an unused id.
        special: spellings of special tokens.
        special_ids: ids of special tokens that are added tokens.
        decoder: the ``decoder`` of tokenizer.json.
        backend_decoder: the same decoder as an object of the ``tokenizers`` library, used if it cannot be streamed.
        longest_token: maximum number of characters of a text that one token can represent; None: no bound.
        ignores_whitespace: whether a token may absorb any number of spaces around it, which then are not counted.
        chat_template: the model's chat template, or the one for chats with tools if there is one; None: the model has
            none.
    """

    tokens: Sequence[str | None]
    special: frozenset[str]
    special_ids: frozenset[int]
    decoder: Mapping[str, Any] | None
    backend_decoder: Any
    longest_token: int | None = None
    ignores_whitespace: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        self._byte_level = any(isinstance(decoder, ByteLevel) for decoder in self.piece_decoders())

    def check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        """Reject a text whose length in characters shows that it exceeds `max_model_len` tokens, without encoding it.

        Raises:
            RequestError: the text is too long.
        """
        if self.longest_token is None or len(text) <= self.longest_token * max_model_len:
            return
        length = len("".join(text.split())) if self.ignores_whitespace else len(text)
        least = -(-length // self.longest_token)
        if least > max_model_len:
            raise RequestError(
                f"this model's maximum context length is {max_model_len} tokens and the text, of {len(text)} "
                f"characters, has at least {least}; shorten it",
                param,
                "context_length_exceeded",
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; unknown ids have no text."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.flush()

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token (``Ġthe``, ``▁the``); None for an unknown id."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Return the spellings of tokens; empty strings for unknown ids."""
        return [self.id_to_token(token_id) or "" for token_id in token_ids]

    def special_token_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens among `texts`."""
        requested = frozenset(texts) & self.special
        return frozenset(token_id for token_id in self.special_ids if self.tokens[token_id] in requested)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, those of its spelling."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self._byte_level:
            return byte_level_bytes(token)
        byte = fallback_byte(token)
        return token.replace("▁", " ").encode() if byte is None else bytes([byte])

    def token_table(self) -> TokenTable:
        """Return the bytes of all tokens, for grammars. Takes a second for a large vocabulary.

        Raises:
            RequestError: the tokenizer does not decode token by token.
        """
        return token_table(self)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - a vocabulary lives as long as its process
    def token_text(self, token_id: int) -> str:
        """Return the text of a single token; U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """See `detokenizer.Decoding`."""
        token = self.id_to_token(token_id)
        return None if skip_special_tokens and token in self.special else token

    def piece_decoders(self) -> list[PieceDecoder]:
        """See `detokenizer.Decoding`."""
        return piece_decoders(self.decoder, self._decode_tokens)

    def _decode_tokens(self, tokens: list[str]) -> str:
        text: str = self.backend_decoder.decode(tokens)
        return text
