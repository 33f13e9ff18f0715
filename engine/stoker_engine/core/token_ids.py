"""Sets of token ids in an array, fast to check, pickle and search even for a whole vocabulary."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, overload
from weakref import WeakValueDictionary


class TokenIds(Sequence[int]):
    """A set of token ids, ascending.

    Args:
        token_ids: integers in any order; duplicates are allowed.

    Raises:
        TypeError: an element is not an integer.
        OverflowError: an element exceeds 64 bits.

    Attributes:
        array: int64; must not be modified.
        num_given: number of ids before duplicates were removed.
    """

    __slots__ = ("__weakref__", "_mask", "array", "num_given")

    array: array[int]
    num_given: int
    _mask: bytearray | None

    def __init__(self, token_ids: Iterable[int]) -> None:
        if isinstance(token_ids, TokenIds):
            self.array, self.num_given, self._mask = token_ids.array, token_ids.num_given, token_ids._mask
            return
        as_list = list(token_ids)
        if bool in set(map(type, as_list)):
            raise TypeError("token ids are integers")
        self.array = array("q", sorted(set(array("q", as_list))))
        self.num_given = len(as_list)
        self._mask = None

    def mask(self, vocab_size: int) -> bytearray:
        """Return a byte per token of the vocabulary: 1 if the set contains it. Cached; must not be modified."""
        if self._mask is None or len(self._mask) != vocab_size:
            self._mask = bytearray(vocab_size)
            for token_id in self.array:
                self._mask[token_id] = 1
        return self._mask

    def __len__(self) -> int:
        return len(self.array)

    def __contains__(self, token_id: object) -> bool:
        if not self.array or not isinstance(token_id, int):
            return False
        index = bisect_left(self.array, token_id)
        return index < len(self.array) and self.array[index] == token_id

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return tuple(self.array[index]) if isinstance(index, slice) else self.array[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            return tuple(self) == tuple(other)
        return isinstance(other, TokenIds) and self.array == other.array

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        fits = not self.array or (self.array[0] >= 0 and self.array[-1] < 2**31)
        code = "i" if fits else "q"
        return _unpickled, (array(code, self.array).tobytes(), code, self.num_given)

    def __repr__(self) -> str:
        first = ", ".join(map(str, self.array[:8]))
        return f"TokenIds([{first}])" if len(self) <= 8 else f"TokenIds([{first}, … {len(self)} in all])"


#: Unpickled sets by content and its dtype, so that the prompts of a request share one object per set.
_known: WeakValueDictionary[tuple[bytes, str], TokenIds] = WeakValueDictionary()


def _unpickled(data: bytes, code: str, num_given: int) -> TokenIds:
    ids = _known.get((data, code))
    if ids is None or ids.num_given != num_given:
        ids = _known[data, code] = TokenIds(())
        ids.array, ids.num_given = array("q", array(code, data)), num_given
    return ids


#: The empty set.
NO_TOKENS = TokenIds(())
