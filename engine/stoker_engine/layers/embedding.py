"""Token embedding and output head. The vocabulary's rows are split across the ranks."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear_site import SiteForm
from stoker_engine.quant.method import Matrix
from stoker_engine.quant.weight_target import Shard, WeightTarget


class Embedding(nn.Module):
    """Token embedding.

    WeightTargets: ``name.weight`` [vocabulary, width], and ``name.columns`` as in `MergedLinear`.

    Attributes:
        rows: token ids whose vectors this rank holds.
    """

    def __init__(self, build: Build, name: str, vocab_size: int, width: int) -> None:
        super().__init__()
        self._param_name, self._width, self._ranks = f"{name}.weight", width, build.ranks
        self.rows = build.share(vocab_size)
        method = build.linear([self._param_name])
        self.matrix: Matrix = method.create(self.rows.size, width, build.dtype, build.kernels)
        self._embed = build.extended(
            self._found, {name: Shard.whole(width)}, Shard.whole(vocab_size), form=SiteForm.EMBEDDING
        )

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 → [tokens, width]."""
        return self._embed(token_ids)

    def _found(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.rows.is_whole:
            return self.matrix.lookup(token_ids)
        ours = token_ids - self.rows.start
        elsewhere = (ours < 0) | (ours >= self.rows.size)
        found = self.matrix.lookup(ours.masked_fill(elsewhere, 0))
        return self._ranks.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    __call__ = forward

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        return _matrix_targets(self._param_name, self.matrix, self.rows, self._width)


class Head(nn.Module):
    """Output head: computes the logits of this rank's shard of the vocabulary.

    WeightTargets: ``name.weight`` [vocabulary, width], unless the head is tied, and ``name.bias``, if it has a bias.

    Args:
        tied: embedding whose matrix the head uses; None: the head has its own matrix.
    """

    def __init__(
        self, build: Build, name: str, vocab_size: int, width: int, bias: bool, tied: Embedding | None
    ) -> None:
        super().__init__()
        self._name, self._width = name, width
        self.rows = build.share(vocab_size)
        self.is_tied = tied is not None
        if tied is None:
            method = build.linear([f"{name}.weight"])
            self.matrix: Matrix = method.create(self.rows.size, width, build.dtype, build.kernels)
        else:
            self.matrix = tied.matrix
        self.bias = nn.Parameter(torch.empty(self.rows.size, dtype=build.dtype), requires_grad=False) if bias else None
        linear = self.matrix.linear(None if self.bias is None else self.bias.data)
        self._linear = build.extended(linear, {name: self.rows}, Shard.whole(width), RowSpace.LOGITS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] → [rows, this rank's shard of the vocabulary]."""
        return self._linear(x)

    __call__ = forward

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets = dict[str, WeightTarget]()
        if not self.is_tied:
            targets.update(_matrix_targets(f"{self._name}.weight", self.matrix, self.rows, self._width))
        if self.bias is not None:
            targets[f"{self._name}.bias"] = WeightTarget.of(self.bias.data, self.rows)
        return targets


def _matrix_targets(name: str, matrix: Matrix, rows: Shard, width: int) -> dict[str, WeightTarget]:
    targets = {name: matrix.weight_target(0, rows, Shard.whole(width))}
    if (columns := matrix.columns_target(0)) is not None:
        targets[f"{name.removesuffix('.weight')}.columns"] = columns
    return targets
