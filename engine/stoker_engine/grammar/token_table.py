"""The vocabulary as bytes: the only part of a tokenizer that the engine needs for grammars."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

#: Bit set in the length of a special token.
_SPECIAL: Final = 1 << 31

#: Maximum length of a token that a grammar can use, in bytes: the depth of llguidance's trie.
_MAX_BYTES: Final = 1000


@dataclass(frozen=True)
class TokenTable:
    """The bytes that each token adds to a text, packed.

    ::

        number of tokens │ length of each, with the top bit set if the token is special │ their bytes

    Attributes:
        data: the packed table; its integers are uint32 in native byte order.
    """

    data: bytes

    @classmethod
    def of(cls, tokens: Sequence[bytes], special: Iterable[int]) -> TokenTable:
        """Pack the bytes of tokens, by id. Tokens without bytes, or with too many, are never allowed by a grammar.

        Args:
            special: ids of special tokens, which never match text.
        """
        token_bytes = [token if len(token) <= _MAX_BYTES else b"" for token in tokens]
        lengths = array("I", map(len, token_bytes))
        for token_id in special:
            if token_id < len(lengths):
                lengths[token_id] |= _SPECIAL
        return cls(array("I", [len(token_bytes)]).tobytes() + lengths.tobytes() + b"".join(token_bytes))

    def unpack(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of all tokens, and the ids of the special ones."""
        header = array("I")
        width = header.itemsize
        [count] = array("I", self.data[:width])
        header.frombytes(self.data[width : width * (1 + count)])
        lengths = [length & ~_SPECIAL for length in header]
        spans = pairwise(accumulate(lengths, initial=width * (1 + count)))
        special = [token_id for token_id, length in enumerate(header) if length & _SPECIAL]
        return [self.data[start:end] for start, end in spans], special
