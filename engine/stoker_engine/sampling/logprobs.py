"""Log-probabilities of tokens, and of the likeliest ones beside them."""

from __future__ import annotations

import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.parallel.transfer import to_device, to_host


def token_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Of each row's token and of its `counts` likeliest ones.

    Args:
        logits: [rows, vocabulary] float32, as the model gave them.
        token_ids: one token a row.
        counts: how many likeliest ones; -1 is all of them.
    """
    vocabulary = logits.shape[-1]
    counts = [vocabulary if count < 0 else min(count, vocabulary) for count in counts]
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, to_device(token_ids, logits.device).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    top = logprobs.topk(max(counts), dim=-1)
    values, indices = to_host(torch.cat((chosen, top.values), dim=1)), to_host(torch.cat((ranks, top.indices), dim=1))
    return [
        TokenLogprobs([token, *likeliest[:count]], own[: 1 + count], rank)
        for token, count, own, (rank, *likeliest) in zip(token_ids, counts, values, indices, strict=True)
    ]


def candidates(logits: torch.Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """Each row's `counts` likeliest tokens with their log-probabilities, best first."""
    most = min(max(counts), logits.shape[-1])
    top = logits.log_softmax(dim=-1).topk(most, dim=-1)
    pairs = zip(to_host(top.indices), to_host(top.values), counts, strict=True)
    return [list(zip(tokens, values, strict=True))[:count] for tokens, values, count in pairs]
