"""Masks the tokens that a grammar does not allow."""

from __future__ import annotations

import torch


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [rows, vocabulary] float32.
        rows: [n] int64, rows to mask.
        allowed: [n, words] int32, a bit for each token of the vocabulary, the lowest first.
    """
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    for row, words in zip(rows.tolist(), allowed, strict=True):
        is_allowed = (words.unsqueeze(1) >> bits & 1).flatten()[: logits.shape[1]].bool()
        logits[row].masked_fill_(is_allowed.logical_not_(), -torch.inf)
