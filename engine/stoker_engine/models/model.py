"""What the runner needs of a model, whichever way it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import AttentionBackend, AttentionPlan, KVCache


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass needs. The batch is flat: all sequences end to end.

    Attributes:
        token_ids, positions: [tokens] int64.
        attention: what the backend made of the step's metadata.
        caches: one a layer that is here.
        rows: int64 [rows], ascending: the tokens that logits are wanted of; None: all. Others are computed as far as
            later ones attend to them.
        hidden_states: filled with [tokens, hidden], the residual stream behind each of the layers of
            `layers.build.Build.hidden_after`, by the layer's number; behind the last layer only of `rows`, if given.
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
        backend: computes its attention, and so plans its steps.
    """

    config: ModelConfig
    backend: AttentionBackend

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Runs one step: [rows, hidden], normalised and ready for `logits`; or [tokens, hidden], for the next stage.

        Args:
            hidden: what the stage before gives, [tokens, hidden]; None: this is the first.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, this rank's part of the vocabulary], float32 or as the head's product gives them."""
        ...
