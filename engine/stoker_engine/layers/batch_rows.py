"""Map from the rows of an activation to the rows of the input batch.

An operation whose result depends on the request, such as one with a LoRA adapter, gets `BatchRows` from `Build` when it
is created, and reads it when it runs. The map differs by *row space*, which depends on the operation's position in the
model:

    TOKENS     all tokens of a step, sequences concatenated
    KEPT       after the last layer's attention: the tokens whose results are needed
    LOGITS     the tokens of the current chunk of logits
    EXPERTS    the tokens of the current expert of a mixture
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")


class RowSpace(Enum):
    """Kind of the rows of an activation (see the module's docstring)."""

    TOKENS = auto()
    KEPT = auto()
    LOGITS = auto()
    EXPERTS = auto()


#: Index of the row for padding in tensors that have one value per row of the input batch: the last one.
PADDING: Final = -1


class BatchRows:
    """Input-batch row of each activation row, by row space.

    Attributes:
        adapters: int64 [rows of the input batch + 1]: slot of the request's adapter, -1 for none. The last element, at
            `PADDING`, is -1.
        extends_experts: whether the experts' operations may depend on the request. If not, one kernel may compute all
            experts.
        has_adapters: whether any row of this step may have an adapter.
    """

    def __init__(self) -> None:
        self.adapters = torch.full((1,), -1)
        self.extends_experts = self.has_adapters = True
        self._tensors: dict[RowSpace, torch.Tensor] = {}
        self._selected: dict[RowSpace, tuple[RowSpace, torch.Tensor]] = {}
        self._grouped: list[tuple[torch.Tensor, Any]] = []

    def begin(self, tokens: torch.Tensor, kept: torch.Tensor | None = None, has_adapters: bool = True) -> None:
        """Start a step.

        Args:
            tokens: int64 [tokens], input-batch row of each token; `PADDING` for padding.
            kept: int64, indices of the tokens in `RowSpace.KEPT`; None: all.
            has_adapters: see the class.
        """
        self._tensors, self.has_adapters = {RowSpace.TOKENS: tokens}, has_adapters
        self._selected.clear()
        self._grouped.clear()
        if kept is None:
            self._tensors[RowSpace.KEPT] = tokens
        else:
            self.select(RowSpace.KEPT, RowSpace.TOKENS, kept)

    def select(self, space: RowSpace, source: RowSpace, indices: torch.Tensor) -> None:
        """Define `space` as these rows of `source`, until `space` is selected again or the next step begins."""
        self._selected[space] = source, indices
        before = self._tensors.pop(space, None)
        self._grouped = [each for each in self._grouped if each[0] is not before]

    def __getitem__(self, space: RowSpace) -> torch.Tensor:
        """Return the input-batch row of each row of the space, int64. It is computed on first use, because most models
        never need it."""
        if space not in self._tensors:
            source, indices = self._selected[space]
            self._tensors[space] = self[source][indices]
        return self._tensors[space]

    def adapters_of(self, space: RowSpace) -> torch.Tensor:
        """Return the adapter slot of each row of the space, int64; -1 for none."""
        return self.adapters[self[space]]

    def grouped(self, space: RowSpace, group: Callable[[torch.Tensor], T]) -> T:
        """Return `group(adapters_of(space))`, computed once for all operations on the same rows. All callers must pass
        the same `group`."""
        rows = self[space]
        for known, groups in self._grouped:
            if known is rows:
                return groups  # type: ignore[no-any-return]
        self._grouped.append((rows, made := group(self.adapters[rows])))
        return made
