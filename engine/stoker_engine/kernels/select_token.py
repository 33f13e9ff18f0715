"""Samples a token from each row of logits.

The sampling parameters give a threshold for each row, below which no token is drawn; ties at the threshold are kept, so
that the result does not depend on a sort's order. One of the kept tokens is drawn by inverting the cumulative
distribution, in the order of token ids, at a given number in [0, 1).
"""

from __future__ import annotations

from typing import Final

import torch

#: Columns of the parameters, which are a single tensor so that they are copied to a device at once.
#:
#: - SCALE: 1 / temperature, from 1e-30 to 1e30, so that no logit becomes NaN;
#: - TOP_K: number of likeliest tokens that are kept; 0, or at least the vocabulary's size, for all;
#: - TOP_P: fraction of the probability that is kept; 1 for all;
#: - LEAST: logarithm of min-p; -inf keeps all tokens;
#: - UNIFORM: random number in [0, 1) that determines the token.
SCALE, TOP_K, TOP_P, LEAST, UNIFORM = COLUMNS = range(5)

#: Number of likeliest tokens that top-p sorts first; the whole vocabulary is sorted only if these are not enough.
_TOP: Final = 1024

#: Number of tokens whose probabilities are summed as one chunk when the distribution is inverted.
_CHUNK: Final = 512


def select_token(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Sample a token from each row. On a GPU this synchronizes, since the host branches on results.

    Args:
        logits: [rows, vocabulary] float32; the largest of each row is finite; -inf is never drawn.
        parameters: [rows, 5] float64, see `COLUMNS`.

    Returns:
        [rows] int64 token ids.
    """
    # Subtracting the largest logit first avoids NaN: with a large scale the others become -inf, and -inf stays -inf.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled *= parameters[:, SCALE, None].to(logits)
    weights = keep_likely(scaled, parameters).exp_()
    return _invert(weights, parameters[:, UNIFORM])


def keep_likely(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Return `logits` with -inf for the tokens that min-p, then top-k, then top-p exclude.

    A token is kept if it is at least min-p times as likely as the likeliest one, fewer than k tokens are likelier, and
    the likelier tokens have less than top-p of the probability of all tokens that min-p and top-k keep.

    Args:
        logits: [rows, vocabulary], scaled by the temperature; the largest of each row is 0.
        parameters: see `select_token`.

    Returns:
        A new tensor of the same shape, or `logits` itself if no row has min-p, top-k or top-p.
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
        # The sorted tokens of a row suffice if they reach top-p, or include all that top-k keeps.
        if num_ranked == vocabulary or bool(((upto[:, -1:] >= top_p * total) | counts | (top_p == 1)).all()):
            break
        num_ranked = vocabulary
    inside = (upto.sub_(weights) < top_p * total) & (weights > 0)
    last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
    lowest = torch.maximum(ranked.gather(1, last), threshold)
    # Rows without top-k and top-p are limited by min-p alone.
    lowest = torch.where(counts | (top_p < 1), lowest, threshold)
    return logits.masked_fill(logits < lowest, -torch.inf)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return [rows] indices at which the cumulative sum of `weights` [rows, n] exceeds `uniform` × their sum.

    Searches the sums of chunks first, then within one chunk, which avoids a float64 cumulative sum over n.
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
    # Rounding may move the target past the chunk's end; then the chunk's likeliest token is drawn.
    within = torch.where(within < _CHUNK, within, inside.argmax(dim=1, keepdim=True))
    return (chunk * _CHUNK + within).squeeze(1)
