"""Which row of the input batch each row of an activation belongs to.

An operation whose result depends on the request (an adapter, say) gets `BatchRows` with `Build` when it is made, and
reads it when it runs. What it finds there depends on where in the model it is: its *row space*.

    TOKENS     all tokens of a step, all sequences end to end
    KEPT       behind the last layer's attention: the tokens whose results are needed
    LOGITS     the tokens that logits are computed of, a chunk at a time
    EXPERTS    the tokens that one expert of a mixture computes
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")


class RowSpace(Enum):
    """What the rows of an activation are; see above."""

    TOKENS = auto()
    KEPT = auto()
    LOGITS = auto()
    EXPERTS = auto()


#: Index of the row that stands for padding, in tensors with a value for each row of the batch: their last one.
PADDING: Final = -1


class BatchRows:
    """The rows of the input batch, by row space.

    Attributes:
        adapters: int64, for each row of the batch the slot of its request's adapter, -1 for none; at `PADDING` too.
        extends_experts: whether operations of experts may depend on the request in this step. Where they do not, a
            kernel may compute all experts at once.
        has_adapters: whether a row of this step may have an adapter.
    """

    def __init__(self) -> None:
        self.adapters = torch.full((1,), -1)
        self.extends_experts = self.has_adapters = True
        self._tensors: dict[RowSpace, torch.Tensor] = {}
        self._selected: dict[RowSpace, tuple[RowSpace, torch.Tensor]] = {}
        self._grouped: list[tuple[torch.Tensor, Any]] = []

    def begin(self, tokens: torch.Tensor, kept: torch.Tensor | None = None, has_adapters: bool = True) -> None:
        """Begins a step.

        Args:
            tokens: int64 [tokens], the row of each, `PADDING` where there is none.
            kept: int64, indices of the tokens in `RowSpace.KEPT`; None: all.
            has_adapters: see above.
        """
        self._tensors, self.has_adapters = {RowSpace.TOKENS: tokens}, has_adapters
        self._selected.clear()
        self._grouped.clear()
        if kept is None:
            self._tensors[RowSpace.KEPT] = tokens
        else:
            self.select(RowSpace.KEPT, RowSpace.TOKENS, kept)

    def select(self, space: RowSpace, source: RowSpace, indices: torch.Tensor) -> None:
        """Has `space` consist of these rows of `source`, until another selection or the next step."""
        self._selected[space] = source, indices
        before = self._tensors.pop(space, None)
        self._grouped = [each for each in self._grouped if each[0] is not before]

    def __getitem__(self, space: RowSpace) -> torch.Tensor:
        """int64 [rows of the space]. It is computed when it is first read: most models read none."""
        if space not in self._tensors:
            source, indices = self._selected[space]
            self._tensors[space] = self[source][indices]
        return self._tensors[space]

    def adapters_of(self, space: RowSpace) -> torch.Tensor:
        """int64 [rows of the space]: the adapter of each, -1 for none."""
        return self.adapters[self[space]]

    def grouped(self, space: RowSpace, group: Callable[[torch.Tensor], T]) -> T:
        """What `group` makes of `adapters_of(space)`: once for all operations on the same rows, which have one
        `group`.
        """
        rows = self[space]
        for known, groups in self._grouped:
            if known is rows:
                return groups  # type: ignore[no-any-return]
        self._grouped.append((rows, made := group(self.adapters[rows])))
        return made
