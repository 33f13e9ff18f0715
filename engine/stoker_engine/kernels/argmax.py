"""The likeliest token of each row."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, vocabulary] float32 → [rows] int64: where each row is largest (the first, if equal), and [rows] float32:
    its largest logit. Of a row that holds nan the largest is nan, and its place means nothing. Some kernels take
    bfloat16, too (`Kernels.narrow_logits`)."""
    return logits.argmax(dim=-1), logits.amax(dim=-1)
