"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.kernels.bundle import Logprobs
from stoker_engine.parallel.transfer import to_device, to_host


def token_logprobs(
    logits: torch.Tensor, token_ids: list[int], counts: list[int], logprobs: Logprobs
) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's token in `token_ids` and of the row's `counts` most likely tokens.

    Args:
        logits: [rows, vocabulary] float32, unmodified logits of the model.
        token_ids: one token per row.
        counts: number of most likely tokens per row; -1: all.
    """
    vocabulary = logits.shape[-1]
    counts = [vocabulary if count < 0 else min(count, vocabulary) for count in counts]
    chosen_logprobs, ranks = logprobs(logits, to_device(token_ids, logits.device))
    likeliest, indices = _likeliest(logits, max(counts), chosen_logprobs)
    values = to_host(torch.cat((chosen_logprobs[:, :1], likeliest), dim=1))
    return [
        TokenLogprobs([token, *tokens[:count]], row_logprobs[: 1 + count], rank)
        for token, count, row_logprobs, (rank, *tokens) in zip(
            token_ids, counts, values, to_host(torch.cat((ranks[:, None], indices), dim=1)), strict=True
        )
    ]


def candidates(
    logits: torch.Tensor, best: torch.Tensor, counts: list[int], logprobs: Logprobs
) -> list[list[tuple[int, float]]]:
    """Return each row's `counts` most likely tokens with their log-probabilities, best first.

    Args:
        best: [rows] int64, the most likely token of each row.
    """
    best_logprobs, _ = logprobs(logits, best)
    likeliest, indices = _likeliest(logits, min(max(counts), logits.shape[-1]), best_logprobs)
    pairs = zip(to_host(indices), to_host(likeliest), counts, strict=True)
    return [list(zip(tokens, values, strict=True))[:count] for tokens, values, count in pairs]


def _likeliest(logits: torch.Tensor, count: int, chosen_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, count] log-probabilities and tokens, normalized with the kernel's results for each row."""
    top = logits.topk(count, dim=-1)
    return top.values - chosen_logprobs[:, 1:2] - chosen_logprobs[:, 2:], top.indices
