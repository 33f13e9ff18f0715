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
    ranks = to_host((logprobs > chosen).sum(dim=-1) + 1)
    top = logprobs.topk(max(counts), dim=-1)
    values, indices, own = to_host(top.values), to_host(top.indices), to_host(chosen.squeeze(1))
    return [
        TokenLogprobs([token, *indices[row][:count]], [own[row], *values[row][:count]], ranks[row])
        for row, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


def candidates(logits: torch.Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """Each row's `counts` likeliest tokens with their log-probabilities, best first."""
    most = min(max(counts), logits.shape[-1])
    top = logits.log_softmax(dim=-1).topk(most, dim=-1)
    pairs = zip(to_host(top.indices), to_host(top.values), counts, strict=True)
    return [list(zip(tokens, values, strict=True))[:count] for tokens, values, count in pairs]
