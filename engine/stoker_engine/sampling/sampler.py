"""Chooses each sequence's next token.

Drawing from the softmax is done as an exponential race: argmax of p(i) / e(i) with e(i) ~ Exp(1) draws i with
probability p(i) (the Gumbel-max trick in another dress). The e(i) depend on the request's seed and the token's
position alone, so a seeded request gives the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from stoker_engine.core.batch import ScheduledSequence


def sample(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[int]:
    """Samples one token a row.

    Args:
        logits: [rows, vocabulary] float32.
        sequences: the row's request each.

    Returns:
        One token id a row.
    """
    random_rows = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if not random_rows:
        return logits.argmax(dim=-1).tolist()
    drawn = _draw(logits[random_rows], [sequences[row] for row in random_rows])
    if len(random_rows) == len(sequences):
        return drawn.tolist()
    tokens = logits.argmax(dim=-1)
    tokens[random_rows] = drawn
    return tokens.tolist()


def _draw(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> torch.Tensor:
    """[rows, vocabulary] → [rows] tokens, drawn."""
    params = [sequence.params for sequence in sequences]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device).unsqueeze(1)
    # The largest logit becomes 0 first: a tiny temperature then overflows to -inf, never to nan.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probs = keep_top(scaled, [p.top_k for p in params], [p.top_p for p in params]).softmax(dim=-1)
    noise = torch.stack([_race(sequence, logits.shape[-1]) for sequence in sequences]).to(logits.device)
    return (probs / noise).argmax(dim=-1)


def keep_top(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Sets to -inf what top-k and then top-p leave out.

    Args:
        logits: [rows, vocabulary], scaled by the temperature.
        top_k: 0 or below keeps all.
        top_p: 1 keeps all; the likeliest token always stays.
    """
    vocabulary = logits.shape[-1]
    keep = [min(k, vocabulary) if k > 0 else vocabulary for k in top_k]
    if max(top_p) == min(top_p) == 1.0 and min(keep) == vocabulary:
        return logits
    # Sorting is what costs; where every row has a top-k, only the largest of them is sorted out.
    ranked, token_ids = logits.topk(max(keep), dim=-1) if max(keep) < vocabulary else logits.sort(descending=True)
    ranks = torch.arange(ranked.shape[-1], device=logits.device)
    ranked = ranked.masked_fill(ranks >= torch.tensor(keep, device=logits.device).unsqueeze(1), -torch.inf)
    probs = ranked.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of all likelier tokens
    # 1 keeps all, also where rounding makes the sum reach 1 before its end.
    limit = [p if p < 1 else torch.inf for p in top_p]
    dropped = before >= torch.tensor(limit, device=logits.device).unsqueeze(1)
    dropped[:, 0] = False
    ranked = ranked.masked_fill(dropped, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, token_ids, ranked)


def _race(sequence: ScheduledSequence, vocabulary: int) -> torch.Tensor:
    """[vocabulary] exponential noise that (seed, position) determines; drawn on the CPU on every device."""
    key = f"{sequence.seed}:{sequence.end}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
    noise = torch.empty(vocabulary).exponential_(generator=generator)
    return noise.clamp_min_(torch.finfo(torch.float32).tiny)
