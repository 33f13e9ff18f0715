"""Settings that all layers of a model are built with."""

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
    """Settings of a model on one rank.

    Attributes:
        dtype: dtype of weights and activations.
        backend: attention backend.
        kernels: kernels of all other operations.
        ranks: communicator of the ranks that split each layer.
        linear: returns the storage method of the matrix with these parameter names (several names: a layer's experts).
        stage: pipeline stage of this rank.
        whole_experts: expert parallelism: each rank holds whole experts, instead of a shard of every expert.
        rows: input-batch rows, read by operations that depend on the request.
        extend: makes linear operations depend on the request; None: they do not.
        hidden_after: indices of layers after which the residual stream is also returned; only those of this pipeline
            stage.
        has_head: whether the last stage computes logits.
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
        """Return `linear`, extended by `self.extend` if that is not None. For the other arguments see `LinearSite`."""
        if self.extend is None:
            return linear
        return ExtendedLinear(self.extend, linear, LinearSite(outputs, inputs, space, form), self.rows)

    def share(self, size: int, multiple: int = 1) -> Shard:
        """Return this rank's shard of a dimension that need not be split equally: an MLP's inner size or the
        vocabulary. The last shards may be smaller.

        Args:
            size: size of the whole dimension.
            multiple: shards start at multiples of this number.

        Raises:
            ModelError: the last ranks would have empty shards.
        """
        rank, ranks = self.ranks.rank, self.ranks.size
        each = largest_part(size, ranks, multiple)
        if not every_part_has_some(size, ranks, multiple):
            raise self._indivisible(f"a dimension of {size} at multiples of {multiple}")
        start = rank * each
        return Shard(start, min(each, size - start), size)

    def widths(self, size: int) -> list[int]:
        """Return the size of each rank's `share(size)`."""
        return [share_of(size, self.ranks.size, 1, rank) for rank in range(self.ranks.size)]

    def experts(self, count: int) -> Shard:
        """Return this rank's experts, under expert parallelism.

        Raises:
            ModelError: there are fewer experts than ranks.
        """
        if count < self.ranks.size:
            raise self._indivisible(f"the model's {count} experts")
        mine = dealt(count, self.ranks.size, self.ranks.rank)
        return Shard(mine.start, len(mine), count)

    def heads(self, num_heads: int) -> Shard:
        """Return this rank's query heads.

        Raises:
            ModelError: the heads cannot be split equally.
        """
        return self._equal(num_heads, "attention heads")

    def kv_heads(self, num_kv_heads: int) -> Shard:
        """Return this rank's key and value heads, which are replicated if there are fewer than ranks.

        Raises:
            ModelError: neither the number of heads nor the number of ranks divides the other.
        """
        ranks = self.ranks.size
        if num_kv_heads < ranks and ranks % num_kv_heads == 0:
            return Shard(self.ranks.rank // (ranks // num_kv_heads), 1, num_kv_heads)
        return self._equal(num_kv_heads, "key and value heads")

    def _equal(self, count: int, what: str) -> Shard:
        each, remainder = divmod(count, self.ranks.size)
        if remainder:
            raise self._indivisible(f"the model's {count} {what}")
        return Shard(self.ranks.rank * each, each, count)

    def _indivisible(self, what: str) -> ModelError:
        return ModelError(f"cannot split {what} across {self.ranks.size} ranks; choose another --tensor-parallel-size")
