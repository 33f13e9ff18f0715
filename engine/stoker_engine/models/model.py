"""Interface between the runner and a model: `Model` and the inputs of its forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import AttentionBackend, AttentionPlan, KVCache


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward pass. The batch is flat: the tokens of all sequences are concatenated.

    Attributes:
        token_ids, positions: [tokens] int64.
        attention: the step's plan, made by the attention backend.
        caches: KV cache of each layer of this pipeline stage.
        rows: int64 [rows], ascending: tokens whose results are needed; None: all.
        hidden_states: output: layer index → residual stream after that layer, [tokens, hidden], for the layers in
            `layers.build.Build.hidden_after`; after the last layer only `rows`, if given.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan
    caches: list[KVCache]
    rows: torch.Tensor | None = None
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)


class Model(Protocol):
    """A decoder-only language model over a paged KV cache.

    Attributes:
        backend: attention backend, which also plans the steps.
    """

    config: ModelConfig
    backend: AttentionBackend

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step.

        Args:
            hidden: [tokens, hidden], output of the previous pipeline stage; None on the first stage.

        Returns:
            [rows, hidden], the input of `logits`; before the last stage [tokens, hidden], the input of the next one.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits: [rows, hidden] → [rows, this rank's shard of the vocabulary], in float32 or the dtype of the
        head's GEMM."""
        ...
