"""The vocabulary as bytes: all that the engine needs of a tokenizer to know what a token would add to an output."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

#: Set in the length of a special token.
_SPECIAL: Final = 1 << 31

#: Most bytes of a token that a grammar can be spelled by: as many as llguidance's trie is deep.
_MAX_BYTES: Final = 1000


@dataclass(frozen=True)
class TokenTable:
    """The bytes that each token adds to a text, packed.

    ::

        number of tokens │ a length for each, its top bit set where the token is special │ their bytes

    Attributes:
        data: these, numbers as unsigned 32-bit ones of the machine.
    """

    data: bytes

    @classmethod
    def of(cls, tokens: Sequence[bytes], special: Iterable[int]) -> TokenTable:
        """Packs the bytes of tokens by id; a token that has none, or too many, is never chosen.

        Args:
            special: ids of tokens that are no text: those are never chosen as such.
        """
        token_bytes = [token if len(token) <= _MAX_BYTES else b"" for token in tokens]
        lengths = array("I", map(len, token_bytes))
        for token_id in special:
            if token_id < len(lengths):
                lengths[token_id] |= _SPECIAL
        return cls(array("I", [len(token_bytes)]).tobytes() + lengths.tobytes() + b"".join(token_bytes))

    def unpack(self) -> tuple[list[bytes], list[int]]:
        """The bytes of all tokens, and the ids of the special ones."""
        header = array("I")
        width = header.itemsize
        [count] = array("I", self.data[:width])
        header.frombytes(self.data[width : width * (1 + count)])
        lengths = [length & ~_SPECIAL for length in header]
        spans = pairwise(accumulate(lengths, initial=width * (1 + count)))
        special = [token_id for token_id, length in enumerate(header) if length & _SPECIAL]
        return [self.data[start:end] for start, end in spans], special
