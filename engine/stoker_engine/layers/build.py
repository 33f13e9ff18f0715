"""What every layer of a model is built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stoker_common.errors import ModelError
from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.kernels.bundle import Kernels, Operation
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.linear_site import ExtendedLinear, ExtendLinear, LinearSite, SiteForm
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.quant.method import LinearMethod
from stoker_engine.quant.unquantized import UNQUANTIZED
from stoker_engine.quant.weight_target import Shard
from stoker_engine.sizing.pipeline_stages import Stage
from stoker_engine.sizing.sharding import dealt, every_part_has_some, largest_part, share_of


def _unquantized(param_names: Sequence[str]) -> LinearMethod:
    return UNQUANTIZED


@dataclass(frozen=True)
class Build:
    """How a model is computed, and which part of it here.

    Attributes:
        dtype: of weights and activations.
        backend: attention's.
        kernels: everything else's.
        ranks: who shares each layer's work.
        linear: how the matrix of these parameters is stored; several are those of a layer's experts.
        stage: which of the layers are here.
        whole_experts: whether ranks have whole experts, instead of a part of each.
        rows: the rows of the input batch, which operations read that depend on the request.
        extend: makes linear operations depend on the request; None: none does.
        hidden_after: the numbers of the layers behind which the residual stream is wanted, too; a stage of a
            pipeline has those of its own layers.
        has_head: whether logits are computed.
    """

    dtype: torch.dtype
    backend: AttentionBackend
    kernels: Kernels
    ranks: Communicator = field(default_factory=SingleRank)
    linear: Callable[[Sequence[str]], LinearMethod] = _unquantized
    stage: Stage = field(default_factory=Stage)
    whole_experts: bool = False
    rows: BatchRows = field(default_factory=BatchRows)
    extend: ExtendLinear | None = None
    hidden_after: frozenset[int] = frozenset()
    has_head: bool = True

    def extended(
        self,
        linear: Operation,
        outputs: Mapping[str, Shard],
        inputs: Shard,
        space: RowSpace = RowSpace.TOKENS,
        form: SiteForm = SiteForm.LINEAR,
    ) -> Operation:
        """A linear operation as it is computed in this model; for the arguments see `LinearSite`."""
        if self.extend is None:
            return linear
        return ExtendedLinear(self.extend, linear, LinearSite(outputs, inputs, space, form), self.rows)

    def share(self, size: int, multiple: int = 1) -> Shard:
        """This rank's share of what can be divided into any parts: columns of an MLP, rows of a vocabulary. Those of
        the first ranks are the largest.

        Args:
            size: of the whole.
            multiple: shares begin at multiples of it.

        Raises:
            ModelError: there is nothing left for the last ranks.
        """
        rank, ranks = self.ranks.rank, self.ranks.size
        each = largest_part(size, ranks, multiple)
        if not every_part_has_some(size, ranks, multiple):
            raise self._indivisible(f"a dimension of {size}, cut at multiples of {multiple}")
        start = rank * each
        return Shard(start, min(each, size - start), size)

    def widths(self, size: int) -> list[int]:
        """What each rank has of a dimension that `share` deals out one by one."""
        return [share_of(size, self.ranks.size, 1, rank) for rank in range(self.ranks.size)]

    def experts(self, count: int) -> Shard:
        """This rank's share of experts that are dealt whole.

        Raises:
            ModelError: they are fewer than the ranks.
        """
        if count < self.ranks.size:
            raise self._indivisible(f"{count} experts")
        mine = dealt(count, self.ranks.size, self.ranks.rank)
        return Shard(mine.start, len(mine), count)

    def heads(self, num_heads: int) -> Shard:
        """This rank's share of the query heads.

        Raises:
            ModelError: they cannot be divided equally.
        """
        return self._equal(num_heads, "attention heads")

    def kv_heads(self, num_kv_heads: int) -> Shard:
        """This rank's share of the key and value heads; where they are fewer than the ranks, several ranks hold the
        same one.

        Raises:
            ModelError: neither divides the other.
        """
        ranks = self.ranks.size
        if num_kv_heads < ranks and ranks % num_kv_heads == 0:
            return Shard(self.ranks.rank // (ranks // num_kv_heads), 1, num_kv_heads)
        return self._equal(num_kv_heads, "key and value heads")

    def _equal(self, count: int, what: str) -> Shard:
        each, remainder = divmod(count, self.ranks.size)
        if remainder:
            raise self._indivisible(f"{count} {what}")
        return Shard(self.ranks.rank * each, each, count)

    def _indivisible(self, what: str) -> ModelError:
        return ModelError(
            f"the model has {what}, which {self.ranks.size} ranks cannot share equally; "
            "choose another --tensor-parallel-size"
        )
