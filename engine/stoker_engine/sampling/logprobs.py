"""Log-probabilities of chosen tokens and of the most likely ones.

The functions start the computation on the device, and return a function that waits for the results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.kernels.bundle import Logprobs
from stoker_engine.parallel.transfer import HostCopy


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, counts: list[int], logprobs: Logprobs
) -> Callable[[], list[TokenLogprobs]]:
    """Compute the log-probabilities of each row's token in `tokens` and of the row's `counts` most likely tokens.

    Args:
        logits: [rows, vocabulary] float32, unmodified logits of the model.
        tokens: [rows] int64, one token per row.
        counts: number of most likely tokens per row; -1: all.
    """
    vocabulary = logits.shape[-1]
    counts = [vocabulary if count < 0 else min(count, vocabulary) for count in counts]
    chosen_logprobs, ranks = logprobs(logits, tokens)
    likeliest, indices = _likeliest(logits, max(counts), chosen_logprobs)
    values = HostCopy(torch.cat((chosen_logprobs[:, :1], likeliest), dim=1))
    ids = HostCopy(torch.cat((ranks[:, None], tokens[:, None], indices), dim=1))

    def collect() -> list[TokenLogprobs]:
        return [
            TokenLogprobs(row_tokens[: 1 + count], row_logprobs[: 1 + count], rank)
            for count, row_logprobs, (rank, *row_tokens) in zip(counts, values.values(), ids.values(), strict=True)
        ]

    return collect


def candidates(
    logits: torch.Tensor, best: torch.Tensor, counts: list[int], logprobs: Logprobs
) -> Callable[[], list[list[tuple[int, float]]]]:
    """Compute each row's `counts` most likely tokens with their log-probabilities, best first.

    Args:
        best: [rows] int64, the most likely token of each row.
    """
    best_logprobs, _ = logprobs(logits, best)
    likeliest, indices = _likeliest(logits, min(max(counts), logits.shape[-1]), best_logprobs)
    tokens, values = HostCopy(indices), HostCopy(likeliest)

    def collect() -> list[list[tuple[int, float]]]:
        pairs = zip(tokens.values(), values.values(), counts, strict=True)
        return [list(zip(row_tokens, row_values, strict=True))[:count] for row_tokens, row_values, count in pairs]

    return collect


def _likeliest(logits: torch.Tensor, count: int, chosen_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, count] log-probabilities and tokens, normalized with the kernel's results for each row."""
    top = logits.topk(count, dim=-1)
    return top.values - chosen_logprobs[:, 1:2] - chosen_logprobs[:, 2:], top.indices
