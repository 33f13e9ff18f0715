"""Logits of some of a step's tokens, on ranks that may split the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.kernels.bundle import Kernels
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.models.model import Model
from stoker_engine.parallel.communicator import Communicator
from stoker_engine.quant.weight_target import Shard
from stoker_engine.sampling.vocab_parallel_argmax import vocab_parallel_argmax


@dataclass(frozen=True, eq=False)
class Logits:
    """Computes logits from hidden states.

    Attributes:
        ranks: the ranks that split the vocabulary.
        vocabulary: this rank's part of the vocabulary.
        widths: size of each rank's part of the vocabulary.
        rows: maps rows of logits to rows of the input batch, for the model's head.
    """

    model: Model
    kernels: Kernels
    ranks: Communicator
    vocabulary: Shard
    widths: list[int]
    rows: BatchRows

    def of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[count, hidden] → [count, this rank's part of the vocabulary] float32, or bfloat16 if `argmax` supports it.

        Args:
            tokens: int64 [count], index in the step of each token.
        """
        self.rows.select(RowSpace.LOGITS, RowSpace.TOKENS, tokens)
        return self._computed(hidden)

    def without_adapters(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits of rows whose requests have no adapter; see `of`."""
        self.rows.has_adapters = False
        return self._computed(hidden)

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely token of each row, int64 [rows], and its logit, float32 [rows], the same on all ranks;
        see `kernels.argmax`.

        Args:
            logits: this rank's part of the logits.
        """
        argmax = self.kernels.argmax
        if self.ranks.size == 1:
            return argmax(logits)
        return vocab_parallel_argmax(logits, self.vocabulary.start, self.ranks, argmax)

    def whole(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[count, hidden] → [count, vocabulary] float32; see `of`."""
        return self.gather(self.of(hidden, tokens))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks: [count, this rank's part] → [count, vocabulary] float32."""
        return self.ranks.all_gather(logits.float(), self.widths)

    def _computed(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(hidden)
        return logits if self.kernels.narrow_logits and logits.dtype == torch.bfloat16 else logits.float()
