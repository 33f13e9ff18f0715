"""An adapter's matrices, by the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Factors:
    """What an adapter adds to one matrix: W + B A.

    Matrices that files hold as one (queries, keys and values) have the same A, which is then one tensor, and B's rows
    are dealt to them as W's are. For the embedding, whose input is a token, A's columns are the vocabulary. Latent
    attention's ``k_b`` and ``v_b`` have a B for each head: [heads, outputs, rank], with one A.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], scaled.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """The number of A's rows."""
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files hold it: whole, whatever part of the model a rank has.

    Attributes:
        factors: by the parameter's name without ``.weight``, as `LinearSite.outputs` has it.
        digest: hexadecimal, of the content of its files.
    """

    factors: Mapping[str, Factors]
    digest: str

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(factors.rank for factors in self.factors.values())
