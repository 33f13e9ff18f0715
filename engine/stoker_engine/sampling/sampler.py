"""Chooses the next tokens of a batch, vectorised: greedy, drawn, or offered by beams.

Some rows at a time, so that what a step holds beside its logits does not grow with the batch (`sizing.memory`).

A row is chosen from only if its largest logit is a finite number: nan anywhere, +inf, or nothing but -inf means that
weights or activations went wrong, and there is no token to be had. Looking costs nothing, for the largest is looked
for anyway. Single tokens at -inf are all right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.parallel.transfer import to_device, to_host
from stoker_engine.sampling.choice import Choice
from stoker_engine.sampling.draw import Draw, draw
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.logprobs import candidates, token_logprobs


def sample(
    logits: torch.Tensor, choices: Sequence[Choice | None], rows_at_once: int, kernels: Kernels
) -> list[Sampled]:
    """Samples each row.

    Args:
        logits: [rows, vocabulary] float32, as the model gave them. They may be overwritten.
        choices: how to choose by each row; None: the likeliest token, and nothing else.
        rows_at_once: most rows that are worked on, `sizing.memory.sampler_rows`.
        kernels: for the device that the logits are on.
    """
    sampled: list[Sampled] = []
    for part in _parts(len(choices), rows_at_once):
        sampled += _sample(logits[part], choices[part], rows_at_once, kernels)
    return sampled


def greedy(best: torch.Tensor, largest: torch.Tensor) -> list[Sampled]:
    """The likeliest token of each row, from what `kernels.argmax` gives."""
    return _greedy(to_host(best), to_host(largest.isfinite()))


def _greedy(best: list[int], finite: list[bool]) -> list[Sampled]:
    return [Sampled([[token]]) if is_finite else _corrupted() for token, is_finite in zip(best, finite, strict=True)]


def _sample(
    logits: torch.Tensor, choices: Sequence[Choice | None], rows_at_once: int, kernels: Kernels
) -> list[Sampled]:
    best, largest = kernels.argmax(logits)
    finite = to_host(largest.isfinite())
    sampled = _greedy(to_host(best), finite)
    special = [(row, choice) for row, choice in enumerate(choices) if choice is not None and finite[row]]
    beams = [(row, choice) for row, choice in special if choice.num_candidates]
    others = [(row, choice) for row, choice in special if not choice.num_candidates]
    if beams:
        offers = candidates(_rows(logits, [row for row, _ in beams]), [beam.num_candidates for _, beam in beams])
        for (row, _), offer in zip(beams, offers, strict=True):
            sampled[row] = Sampled([], candidates=offer)
    if others:
        rows = [row for row, _ in others]
        chosen = _choose(
            _rows(logits, rows), [choice for _, choice in others], _rows(best, rows), rows_at_once, kernels
        )
        for row, its in zip(rows, chosen, strict=True):
            sampled[row] = its
    return sampled


def _choose(
    logits: torch.Tensor, choices: list[Choice], best: torch.Tensor, rows_at_once: int, kernels: Kernels
) -> list[Sampled]:
    """Rows without beams. A row that several samples are drawn from stands for as many."""
    finite = [True] * len(choices)
    constrained = _constrained(logits, choices, kernels)
    processed = process_logits(constrained, choices)
    if processed is not logits or any(c.allowed is not None for c in choices):
        best, largest = kernels.argmax(processed)
        finite = to_host(largest.isfinite())
    likeliest = to_host(best)

    places = [(row, i) for row, c in enumerate(choices) if finite[row] for i in range(c.num_samples)]
    tokens = [likeliest[row] for row, _ in places]
    draws: dict[int, Draw] = {}  # by place
    for place, (row, i) in enumerate(places):
        c = choices[row]
        if (p := c.params).kind == "generate" and p.temperature > 0:
            draws[place] = Draw(p.temperature, p.top_k, p.top_p, p.min_p, c.seed + i, len(c.known))
    drawn_places = list(draws)
    for part in _parts(len(draws), rows_at_once):
        of_part = drawn_places[part]
        drawn = draw(_rows(processed, [places[place][0] for place in of_part]), [draws[place] for place in of_part])
        for place, token in zip(of_part, to_host(drawn), strict=True):
            tokens[place] = token

    asked = [
        (place, p.logprobs)
        for place, (row, _) in enumerate(places)
        if (p := choices[row].params).kind == "generate" and p.logprobs is not None
    ]
    logprobs: dict[int, TokenLogprobs] = {}
    for part in _parts(len(asked), rows_at_once):
        of_part = [place for place, _ in asked[part]]
        rows = _rows(logits, [places[place][0] for place in of_part])
        found = token_logprobs(rows, [tokens[place] for place in of_part], [count for _, count in asked[part]])
        logprobs.update(zip(of_part, found, strict=True))

    sampled, place = [], 0
    for row, c in enumerate(choices):
        if not finite[row]:
            sampled.append(_corrupted())
            continue
        mine = range(place, place + c.num_samples)
        place += c.num_samples
        of_row = [[logprobs[p]] for p in mine if p in logprobs]
        sampled.append(Sampled([[tokens[p]] for p in mine], of_row or None))
    return sampled


def _constrained(logits: torch.Tensor, choices: list[Choice], kernels: Kernels) -> torch.Tensor:
    """What grammars leave; in place, unless somebody asks for what was there."""
    masks = [(row, c.allowed) for row, c in enumerate(choices) if c.allowed is not None]
    if not masks:
        return logits
    if any(c.params.kind == "generate" and c.params.logprobs is not None for c in choices):
        logits = logits.clone()
    rows = to_device([row for row, _ in masks], logits.device)
    kernels.keep_allowed(logits, rows, to_device(np.stack([allowed for _, allowed in masks]), logits.device))
    return logits


def _corrupted() -> Sampled:
    return Sampled([], is_corrupted=True)


def _parts(count: int, at_once: int) -> Iterator[slice]:
    """`count` things, `at_once` at a time."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _rows(numbers: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; no copy where they are all of them."""
    return numbers if rows == list(range(len(numbers))) else numbers[to_device(rows, numbers.device)]
