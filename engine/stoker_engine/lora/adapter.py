"""An adapter's matrices, by the model's parameter that they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Factors:
    """Low-rank update of one matrix: W + B A.

    Parameters that a checkpoint stores as one fused matrix (such as queries, keys and values) share the tensor A; B's
    rows are split like those of W. The embedding's inputs are tokens, so its A has a column for each token of the
    vocabulary. Latent attention's ``k_b`` and ``v_b`` have one A, and a B for each head: [heads, outputs, rank].

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], or [heads, outputs, rank]; already multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as read from its files, before it is sharded.

    Attributes:
        factors: matrices by parameter name without ``.weight``, as in `LinearSite.outputs`.
        digest: hexadecimal digest of the files' content.
    """

    factors: Mapping[str, Factors]
    digest: str
