"""Linear operations whose results also depend on the request, such as those with adapters (LoRA).

A model is built with `Build.extend`, which gets each linear operation with its `LinearSite`, the embedding and the head
among them, and returns what is computed instead. Extensions belong there rather than around a `LinearMethod`: a
method does not know the rows, nor what ranks share, and a CPU's call of whole layers must find the operation as its
own (`kernels.cpu.matrix.CpuLinear.extended`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch

from stoker_engine.kernels.bundle import Operation
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.quant.prepack import resolve_prepack
from stoker_engine.quant.weight_target import Shard


class SiteForm(Enum):
    """What an operation does with its matrices."""

    #: x [rows, inputs] → [rows, outputs].
    LINEAR = auto()
    #: Token ids [rows] → [rows, outputs].
    EMBEDDING = auto()
    #: Queries [rows, heads, keys] → [rows, heads, latent], by the matrix that makes each head's keys of latents.
    ABSORBED_KEYS = auto()
    #: Latents [rows, heads, latent] → [rows, heads, values], by the matrix that makes each head's values of them.
    ABSORBED_VALUES = auto()


@dataclass(frozen=True)
class LinearSite:
    """Where in the model a linear operation is.

    Attributes:
        outputs: for each matrix merged into it, by its parameter's name, the outputs that this rank computes; their
            results lie side by side. Of a matrix that is absorbed, the heads.
        inputs: the columns that this rank has; where that is not all of them, the ranks' results are summed up behind
            it.
        space: what the rows of its argument are.
        form: what it does with its matrices.
    """

    outputs: Mapping[str, Shard]
    inputs: Shard
    space: RowSpace
    form: SiteForm = SiteForm.LINEAR


#: (the operation, its site, the rows of the batch) → the operation computed instead. It may be called again for a site,
#: once the matrix is packed.
ExtendLinear = Callable[[Operation, LinearSite, BatchRows], Operation]


class ExtendedLinear:
    """A linear operation as it is extended, before its matrix is packed and after."""

    def __init__(self, extend: ExtendLinear, linear: Operation, site: LinearSite, rows: BatchRows) -> None:
        self._extend, self._linear, self._site, self._rows = extend, linear, site, rows
        self._extended = extend(linear, site, rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        return self._extended(x)

    @property
    def now(self) -> Operation:
        """See `quant.prepack.Resolvable`."""
        return self._extend(resolve_prepack(self._linear), self._site, self._rows)
