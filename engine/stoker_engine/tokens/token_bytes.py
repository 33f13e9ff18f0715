"""The bytes that each token adds to a text, for grammars.

The bytes are those in the middle of a text, where outputs are. Tokenizers in which the text of a token depends on the
next one are not supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_common.errors import RequestError
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.tokens.piece_decoders import (
    ByteFallback,
    ByteLevel,
    PieceDecoder,
    Whole,
    WordEnd,
    byte_level_bytes,
    fallback_byte,
    write_through,
)

if TYPE_CHECKING:
    from stoker_engine.tokens.vocabulary import Vocabulary


def token_table(vocabulary: Vocabulary) -> TokenTable:
    """Return the bytes of all tokens.

    Raises:
        RequestError: the tokenizer's decoder does not decode token by token.
    """
    decoders = vocabulary.piece_decoders()
    if any(isinstance(decoder, Whole | WordEnd) for decoder in decoders):
        raise RequestError(
            "structured outputs are not supported: this model's tokenizer does not decode token by token",
            "structured_outputs",
        )
    special = {token_id for token_id, token in enumerate(vocabulary.tokens) if token in vocabulary.special}
    special |= vocabulary.special_ids
    if any(isinstance(decoder, ByteLevel) for decoder in decoders):
        token_bytes = [b"" if token is None else byte_level_bytes(token) for token in vocabulary.tokens]
    else:
        write_through(decoders, ["x"])  # so that the next token is not the first of the text
        falls_back = any(isinstance(decoder, ByteFallback) for decoder in decoders)
        token_bytes = [b"" if token is None else _bytes(decoders, token, falls_back) for token in vocabulary.tokens]
    for token_id in special:
        if (token := vocabulary.id_to_token(token_id)) is not None:
            token_bytes[token_id] = token.encode()
    return TokenTable.of(token_bytes, special)


def _bytes(decoders: list[PieceDecoder], token: str, falls_back: bool) -> bytes:
    byte = fallback_byte(token) if falls_back else None
    return write_through(decoders, [token]).encode("utf-8", "surrogatepass") if byte is None else bytes([byte])
