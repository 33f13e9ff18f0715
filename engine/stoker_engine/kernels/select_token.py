"""Draws a token from each row of logits.

The parameters make a threshold for each row, below which nothing is drawn; ties at the threshold stay, so that the
result does not depend on how a sort orders them. From what is left one token is drawn by inverting the cumulative
distribution, in the order of token ids, at a number in [0, 1) that is given.
"""

from __future__ import annotations

from typing import Final

import torch

#: Columns of the parameters, which are one tensor, so that they reach a device as one.
#:
#: - SCALE: 1 / temperature, from 1e-30 to 1e30, so that no number becomes nan;
#: - TOP_K: how many of the likeliest tokens are kept; 0, or as many as there are: all;
#: - TOP_P: the share of the probability that is kept; 1: all;
#: - LEAST: the logarithm of min-p; -inf: it keeps all;
#: - UNIFORM: the number in [0, 1) that the token is drawn by.
SCALE, TOP_K, TOP_P, LEAST, UNIFORM = COLUMNS = range(5)

#: Likeliest tokens that top-p looks at before it sorts the whole vocabulary; almost always they hold enough.
_TOP: Final = 1024

#: Tokens whose probabilities are summed at once on the way to the one that is drawn.
_CHUNK: Final = 512


def select_token(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Draws a token from each row. On a GPU the host waits here for what it branches on.

    Args:
        logits: [rows, vocabulary] float32, the largest of each row a finite number; -inf is never drawn.
        parameters: [rows, 5] float64, see `COLUMNS`.

    Returns:
        [rows] int64 token ids.
    """
    # The largest logit becomes 0 first: a scale so large that all others become -inf then gives no nan; nor does a
    # small one, by which -inf stays that.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled *= parameters[:, SCALE, None].to(logits)
    weights = keep_likely(scaled, parameters).exp_()
    return _invert(weights, parameters[:, UNIFORM])


def keep_likely(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Sets to -inf what min-p, then top-k, then top-p leave out.

    A token stays if it is at least min-p times as likely as the likeliest one, fewer than k tokens are likelier, and
    those that are likelier and stay have less than top-p of what min-p and top-k leave.

    Args:
        logits: [rows, vocabulary], scaled by the temperature; the largest of each row is 0.
        parameters: see `select_token`.

    Returns:
        A tensor of the same shape, or `logits` itself where nothing is left out.
    """
    vocabulary = logits.shape[-1]
    threshold = parameters[:, LEAST, None].to(logits)
    top_p = parameters[:, TOP_P, None]
    kept = parameters[:, TOP_K, None].long()
    kept = torch.where((kept > 0) & (kept < vocabulary), kept, vocabulary)
    counts = kept < vocabulary
    if not bool((counts | (top_p < 1)).any()):
        return logits if bool((threshold == -torch.inf).all()) else logits.masked_fill(logits < threshold, -torch.inf)

    num_ranked = int(torch.where(counts, kept, 0).max())
    whole = torch.zeros_like(top_p)
    if bool(((top_p < 1) & ~counts).any()):
        num_ranked = max(num_ranked, min(_TOP, vocabulary))
        whole = torch.where(logits < threshold, 0.0, logits.exp()).sum(-1, keepdim=True, dtype=torch.float64)
    while True:
        ranked = logits.topk(num_ranked, dim=-1).values
        ranks = torch.arange(num_ranked, device=logits.device)
        weights = ranked.exp().double().masked_fill_((ranks >= kept) | (ranked < threshold), 0)
        total = torch.where(counts, weights.sum(-1, keepdim=True), whole)
        upto = weights.cumsum(dim=-1)
        # The top of a row is enough when it reaches top-p, or holds all that its top-k keeps.
        if num_ranked == vocabulary or bool(((upto[:, -1:] >= top_p * total) | counts | (top_p == 1)).all()):
            break
        num_ranked = vocabulary
    inside = (upto.sub_(weights) < top_p * total) & (weights > 0)
    last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
    lowest = torch.maximum(ranked.gather(1, last), threshold)
    # Rows without top-k and top-p are cut by min-p alone.
    lowest = torch.where(counts | (top_p < 1), lowest, threshold)
    return logits.masked_fill(logits < lowest, -torch.inf)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[rows] indices at which the running sum of `weights` [rows, n] passes `uniform` × their sum.

    Two steps, first over sums of chunks, then within one: far fewer float64 additions than n.
    """
    size = weights.shape[1]
    whole = size // _CHUNK * _CHUNK
    sums = weights[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), dim=1)
    upto = sums.cumsum(dim=1)
    target = uniform.unsqueeze(1) * upto[:, -1:]
    chunk = torch.searchsorted(upto, target, right=True).clamp_max(sums.shape[1] - 1)
    before = upto.gather(1, chunk) - sums.gather(1, chunk)
    index = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    inside = weights.gather(1, index.clamp_max(size - 1)).double().masked_fill(index >= size, 0)
    within = torch.searchsorted(inside.cumsum(dim=1), target - before, right=True)
    # Rounding may put the target at the chunk's very end; then its likeliest token stands for the last one.
    within = torch.where(within < _CHUNK, within, inside.argmax(dim=1, keepdim=True))
    return (chunk * _CHUNK + within).squeeze(1)
