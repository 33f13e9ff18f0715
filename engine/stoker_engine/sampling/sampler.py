"""Chooses the next tokens of a batch, vectorised: greedy, drawn, or offered by beams."""

from __future__ import annotations

import torch

from stoker_engine.core.batch import Sampled, ScheduledSequence
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.kernels.argmax import argmax
from stoker_engine.sampling.draw import Draw, draw
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.logprobs import candidates, token_logprobs


def sample(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
    """Samples each row.

    Args:
        logits: [rows, vocabulary] float32, as the model gave them.
        sequences: the row's sequence each.
    """
    beams = [row for row, sequence in enumerate(sequences) if sequence.num_candidates]
    if not beams:
        return _sample(logits, sequences)
    offers = candidates(logits[beams], [sequences[row].num_candidates for row in beams])
    others = [row for row, sequence in enumerate(sequences) if not sequence.num_candidates]
    sampled = {row: Sampled([], candidates=offer) for row, offer in zip(beams, offers, strict=True)}
    if others:
        rest = _sample(logits[others], [sequences[row] for row in others])
        sampled.update(zip(others, rest, strict=True))
    return [sampled[row] for row in range(len(sequences))]


def _sample(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
    """Rows without beams. A row that several samples are drawn from stands for as many."""
    params = [s.params for s in sequences]
    places = [(row, i) for row, s in enumerate(sequences) for i in range(s.num_samples)]
    processed = process_logits(logits, sequences)

    draws: dict[int, Draw] = {}  # by place
    for place, (row, i) in enumerate(places):
        p, s = params[row], sequences[row]
        if isinstance(p, SamplingParams) and p.temperature > 0:
            draws[place] = Draw(p.temperature, p.top_k, p.top_p, p.min_p, s.seed + i, s.end)
    tokens = [0] * len(places)
    if len(draws) < len(places):
        best = argmax(processed).tolist()
        tokens = [best[row] for row, _ in places]
    if draws:
        rows = [places[place][0] for place in draws]
        every = rows == list(range(len(sequences)))
        drawn = draw(processed if every else processed[rows], list(draws.values()))
        for place, token in zip(draws, drawn.tolist(), strict=True):
            tokens[place] = token

    told = [
        (place, p.logprobs)
        for place, (row, _) in enumerate(places)
        if isinstance(p := params[row], SamplingParams) and p.logprobs is not None
    ]
    logprobs = {}
    if told:
        rows = [places[place][0] for place, _ in told]
        found = token_logprobs(logits[rows], [tokens[place] for place, _ in told], [count for _, count in told])
        logprobs = dict(zip([place for place, _ in told], found, strict=True))

    sampled, place = [], 0
    for s in sequences:
        mine = range(place, place + s.num_samples)
        place += s.num_samples
        asked = [logprobs[p] for p in mine if p in logprobs]
        sampled.append(Sampled([tokens[p] for p in mine], asked or None))
    return sampled
