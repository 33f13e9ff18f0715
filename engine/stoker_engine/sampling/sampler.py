"""Chooses the next tokens of a batch, vectorised: greedy, drawn, or offered by beams.

Some rows at a time, so that what a step holds beside its logits does not grow with the batch (`sizing.memory`).

A row is chosen from only if its largest logit is a finite number: nan anywhere, +inf, or nothing but -inf means that
weights or activations went wrong, and there is no token to be had. Looking costs nothing, for the largest is looked
for anyway. Single tokens at -inf are all right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stoker_engine.core.batch import Sampled, ScheduledSequence
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.kernels.argmax import argmax
from stoker_engine.sampling.draw import Draw, draw
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.logprobs import candidates, token_logprobs

_CORRUPTED = Sampled([], is_corrupted=True)


def sample(logits: torch.Tensor, sequences: list[ScheduledSequence], rows_at_once: int) -> list[Sampled]:
    """Samples each row.

    Args:
        logits: [rows, vocabulary] float32, as the model gave them.
        sequences: the row's sequence each.
        rows_at_once: most rows that are worked on, `sizing.memory.sampler_rows`.
    """
    sampled: list[Sampled] = []
    for part in _parts(len(sequences), rows_at_once):
        sampled += _sample(logits[part], sequences[part], rows_at_once)
    return sampled


def _sample(logits: torch.Tensor, sequences: list[ScheduledSequence], rows_at_once: int) -> list[Sampled]:
    best, largest = argmax(logits)
    finite = largest.isfinite().tolist()
    beams = [row for row, s in enumerate(sequences) if s.num_candidates and finite[row]]
    others = [row for row, s in enumerate(sequences) if not s.num_candidates and finite[row]]
    if len(others) == len(sequences):
        return _choose(logits, sequences, best, rows_at_once)
    sampled = [_CORRUPTED] * len(sequences)
    if beams:
        offers = candidates(logits[beams], [sequences[row].num_candidates for row in beams])
        for row, offer in zip(beams, offers, strict=True):
            sampled[row] = Sampled([], candidates=offer)
    if others:
        chosen = _choose(logits[others], [sequences[row] for row in others], best[others], rows_at_once)
        for row, its in zip(others, chosen, strict=True):
            sampled[row] = its
    return sampled


def _choose(
    logits: torch.Tensor, sequences: list[ScheduledSequence], best: torch.Tensor, rows_at_once: int
) -> list[Sampled]:
    """Rows without beams. A row that several samples are drawn from stands for as many."""
    finite = [True] * len(sequences)
    processed = process_logits(logits, sequences)
    if processed is not logits:
        best, largest = argmax(processed)
        finite = largest.isfinite().tolist()
    likeliest = best.tolist()

    params = [s.params for s in sequences]
    places = [(row, i) for row, s in enumerate(sequences) if finite[row] for i in range(s.num_samples)]
    tokens = [likeliest[row] for row, _ in places]
    draws: dict[int, Draw] = {}  # by place
    for place, (row, i) in enumerate(places):
        p, s = params[row], sequences[row]
        if isinstance(p, SamplingParams) and p.temperature > 0:
            draws[place] = Draw(p.temperature, p.top_k, p.top_p, p.min_p, s.seed + i, s.end)
    drawn_places = list(draws)
    for part in _parts(len(draws), rows_at_once):
        of_part = drawn_places[part]
        drawn = draw(_rows(processed, [places[place][0] for place in of_part]), [draws[place] for place in of_part])
        for place, token in zip(of_part, drawn.tolist(), strict=True):
            tokens[place] = token

    told = [
        (place, p.logprobs)
        for place, (row, _) in enumerate(places)
        if isinstance(p := params[row], SamplingParams) and p.logprobs is not None
    ]
    logprobs: dict[int, TokenLogprobs] = {}
    for part in _parts(len(told), rows_at_once):
        of_part = [place for place, _ in told[part]]
        rows = _rows(logits, [places[place][0] for place in of_part])
        found = token_logprobs(rows, [tokens[place] for place in of_part], [count for _, count in told[part]])
        logprobs.update(zip(of_part, found, strict=True))

    sampled, place = [], 0
    for row, s in enumerate(sequences):
        if not finite[row]:
            sampled.append(_CORRUPTED)
            continue
        mine = range(place, place + s.num_samples)
        place += s.num_samples
        asked = [logprobs[p] for p in mine if p in logprobs]
        sampled.append(Sampled([tokens[p] for p in mine], asked or None))
    return sampled


def _parts(count: int, at_once: int) -> Iterator[slice]:
    """`count` things, `at_once` at a time."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; no copy where they are all of them."""
    return logits if rows == list(range(len(logits))) else logits[rows]
