"""Log-probabilities: each row's normalizer, and a token's log-probability and rank."""

from __future__ import annotations

import torch


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities: (logit - largest of the row) - log(Σ exp(logit - largest)).

    Args:
        logits: [rows, vocabulary] float32.
        tokens: [rows] int64.

    Returns:
        [rows, 3] float32: the token's log-probability, the largest logit, the logarithm of the sum; and [rows] int64:
        the token's rank, 1 for the likeliest.
    """
    token_logits = logits.gather(1, tokens[:, None])
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, keepdim=True).log_()
    return torch.cat((token_logits - largest - total, largest, total), dim=1), (logits > token_logits).sum(-1) + 1
