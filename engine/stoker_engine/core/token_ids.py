"""Distinct token ids in an array, so that a whole vocabulary of them is checked, pickled and searched in no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenIds(Sequence[int]):
    """A set of token ids, ascending.

    Args:
        token_ids: integers, in any order, some perhaps twice.

    Raises:
        TypeError: something else, or an integer beyond 64 bits.

    Attributes:
        array: [n] int64, not to be written to.
        num_given: how many there were before equal ones became one.
    """

    __slots__ = ("__weakref__", "_mask", "array", "num_given")

    array: Ids
    num_given: int
    _mask: Mask | None

    def __init__(self, token_ids: Iterable[int]) -> None:
        if isinstance(token_ids, TokenIds):
            self.array, self.num_given, self._mask = token_ids.array, token_ids.num_given, token_ids._mask
            return
        given = np.array(list(token_ids))
        if given.ndim != 1 or (given.size and given.dtype.kind != "i"):
            raise TypeError("token ids are integers")
        self.array = np.unique(given.astype(np.int64))
        self.num_given = len(given)
        self._mask = None

    def mask(self, vocab_size: int) -> Mask:
        """[vocab_size] whether each token is among them; made once."""
        mask = self._mask
        if mask is None or len(mask) != vocab_size:
            mask = self._mask = np.zeros(vocab_size, np.bool_)
            mask[self.array] = True
        return mask

    def __len__(self) -> int:
        return len(self.array)

    def __contains__(self, token_id: object) -> bool:
        if not len(self.array) or not isinstance(token_id, int | np.integer):
            return False
        place = int(self.array.searchsorted(token_id))
        return place < len(self.array) and bool(self.array[place] == token_id)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found: Any = self.array[index]
        return tuple(found.tolist()) if isinstance(index, slice) else int(found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            return tuple(self) == tuple(other)
        return isinstance(other, TokenIds) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        fits = not len(self.array) or (self.array[0] >= 0 and self.array[-1] < 2**31)
        dtype = "int32" if fits else "int64"
        return _unpickled, (self.array.astype(dtype).tobytes(), dtype, self.num_given)

    def __repr__(self) -> str:
        first = ", ".join(map(str, self.array[:8].tolist()))
        return f"TokenIds([{first}])" if len(self) <= 8 else f"TokenIds([{first}, … {len(self)} in all])"


#: Those that came out of a pickle: the prompts of one request share theirs.
_known: WeakValueDictionary[bytes, TokenIds] = WeakValueDictionary()


def _unpickled(data: bytes, dtype: str, num_given: int) -> TokenIds:
    ids = _known.get(data)
    if ids is None or ids.num_given != num_given:
        ids = _known[data] = TokenIds(())
        ids.array, ids.num_given = np.frombuffer(data, dtype).astype(np.int64), num_given
    return ids


#: None at all.
NO_TOKENS = TokenIds(())
