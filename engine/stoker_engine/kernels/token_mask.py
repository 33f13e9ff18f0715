"""Takes tokens out of the choice: what a grammar leaves of each row of logits."""

from __future__ import annotations

import torch


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Sets to -inf, in place, every number of some rows but those of allowed tokens.

    Args:
        logits: [rows, vocabulary] float32.
        rows: [n] int64, which rows.
        allowed: [n, words] int32, a bit for each token of the vocabulary, the lowest first.
    """
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    for row, words in zip(rows.tolist(), allowed, strict=True):
        is_allowed = (words.unsqueeze(1) >> bits & 1).flatten()[: logits.shape[1]].bool()
        logits[row].masked_fill_(is_allowed.logical_not_(), -torch.inf)
