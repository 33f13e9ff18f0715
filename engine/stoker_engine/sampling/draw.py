"""Draws a token from each row of logits.

The parameters make a threshold for each row, below which nothing is drawn; ties at the threshold stay, so that the
result does not depend on how a sort orders them. From what is left one token is drawn by inverting the cumulative
distribution, in the order of token ids, at a number in [0, 1) that the request's seed and the token's position alone
determine. So a seeded request gives the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch

from stoker_engine.parallel.transfer import to_device

#: Likeliest tokens that top-p looks at before it sorts the whole vocabulary; almost always they hold enough.
_TOP = 1024

#: Tokens whose probabilities are summed at once on the way to the one that is drawn.
_CHUNK = 512


@dataclass(frozen=True)
class Draw:
    """How one token is drawn."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def draw(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Draws from rows whose temperature is above 0.

    Args:
        logits: [rows, vocabulary] float32; -inf is never drawn.

    Returns:
        [rows] int64 token ids.
    """
    # The largest logit becomes 0 first: a temperature so tiny that it is clamped then gives -inf, never nan; nor does a
    # huge one, by which -inf stays that.
    temperature = to_device([d.temperature for d in draws], logits.device, torch.float64)
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= temperature.to(logits).clamp(1e-30, 1e30).unsqueeze(1)
    scaled = keep_likely(scaled, draws)
    weights = scaled.exp_()
    uniform = to_device([_uniform(d.seed, d.position) for d in draws], logits.device, torch.float64)
    return _invert(weights, uniform)


def keep_likely(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Sets to -inf what min-p, then top-k, then top-p leave out.

    Args:
        logits: [rows, vocabulary], scaled by the temperature; the largest of each row is 0.

    Returns:
        A tensor of the same shape, or `logits` itself where nothing is left out.
    """
    vocabulary = logits.shape[-1]
    keep = [d.top_k if 0 < d.top_k < vocabulary else vocabulary for d in draws]
    min_p = to_device([d.min_p for d in draws], logits.device)
    threshold = min_p.log().unsqueeze(1)  # of 0 it is -inf
    if all(d.top_p == 1 for d in draws) and min(keep) == vocabulary:
        return logits if not min_p.any() else logits.masked_fill(logits < threshold, -torch.inf)

    most = max((k for k in keep if k < vocabulary), default=0)
    if any(d.top_p < 1 and k == vocabulary for d, k in zip(draws, keep, strict=True)):
        most = max(most, min(_TOP, vocabulary))
    top_p = to_device([d.top_p for d in draws], logits.device, torch.float64).unsqueeze(1)
    kept = to_device(keep, logits.device).unsqueeze(1)
    whole = torch.where(logits < threshold, 0.0, logits.exp()).sum(-1, keepdim=True, dtype=torch.float64)
    while True:
        ranked = logits.topk(most, dim=-1).values
        ranks = torch.arange(most, device=logits.device)
        weights = ranked.exp().double().masked_fill_((ranks >= kept) | (ranked < threshold), 0)
        total = torch.where(kept < vocabulary, weights.sum(-1, keepdim=True), whole)
        upto = weights.cumsum(dim=-1)
        # The top of a row is enough when it reaches top-p, or holds all that its top-k keeps.
        if most == vocabulary or bool(((upto[:, -1:] >= top_p * total) | (kept <= most) | (top_p == 1)).all()):
            break
        most = vocabulary
    inside = (upto.sub_(weights) < top_p * total) & (weights > 0)
    last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
    lowest = ranked.gather(1, last)
    # Rows without top-k and top-p are cut by min-p alone.
    lowest = torch.where((kept == vocabulary) & (top_p == 1), threshold, torch.maximum(lowest, threshold))
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


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) determine."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
