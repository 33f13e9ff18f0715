"""Linear operations whose results also depend on the request, such as those with LoRA adapters.

`Build.extend` gets each linear operation of a model, including the embedding and the head, together with its
`LinearSite`, and returns the operation that replaces it. This is not a part of `LinearMethod` for two reasons: a method
knows neither the rows nor the shards, and the CPU backend's call of whole layers must recognise the extended operation
as its own kernel (`kernels.cpu.matrix.CpuLinear.extended`).
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
    """Argument and result of a linear operation."""

    #: x [rows, inputs] → [rows, outputs].
    LINEAR = auto()
    #: Token ids [rows] → [rows, outputs].
    EMBEDDING = auto()
    #: Queries [rows, heads, keys] → [rows, heads, latent], with each head's matrix that maps latents to keys.
    ABSORBED_KEYS = auto()
    #: Latents [rows, heads, latent] → [rows, heads, values], with each head's matrix that maps latents to values.
    ABSORBED_VALUES = auto()


@dataclass(frozen=True)
class LinearSite:
    """Position of a linear operation in the model.

    Attributes:
        outputs: for each merged matrix, by parameter name without ``.weight``, the outputs that this rank computes; the
            results are concatenated. For absorbed matrices: this rank's heads.
        inputs: this rank's input columns (for the embedding, the vocabulary; for absorbed matrices, the columns of a
            head's matrix); if they are not all, the result is all-reduced after the operation.
        space: row space of the input.
        form: kind and shapes of the input and result.
    """

    outputs: Mapping[str, Shard]
    inputs: Shard
    space: RowSpace
    form: SiteForm = SiteForm.LINEAR


#: (operation, its site, rows of the input batch) → the operation that replaces it. Called again for a site after its
#: matrix is prepacked.
ExtendLinear = Callable[[Operation, LinearSite, BatchRows], Operation]


class ExtendedLinear:
    """An extended linear operation, usable before and after its matrix is prepacked."""

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
