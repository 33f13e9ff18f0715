"""The likeliest token of each row."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each row's largest logit (the first of equal ones), int64 [rows], and that logit, float32
    [rows].

    Args:
        logits: [rows, vocabulary] float32; some kernels also accept bfloat16 (`Kernels.narrow_logits`). For a row that
            contains NaN the logit is NaN, and the index is undefined.
    """
    return logits.argmax(dim=-1), logits.amax(dim=-1)
