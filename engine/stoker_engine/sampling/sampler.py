"""Chooses the next tokens of a batch, vectorized: greedy, sampled, or as candidates of beams.

A limited number of rows is processed at a time, which bounds a step's memory besides its logits (`sizing.activations`).

A token is chosen only if the row's largest logit is finite. NaN, +inf, or -inf in all places means that weights or
activations are corrupted, and no token can be chosen. The check is free, since the largest logit is computed anyway.
Single logits of -inf are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.parallel.transfer import to_device, to_host
from stoker_engine.sampling.draw import Draw, draw
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.logprobs import candidates, token_logprobs
from stoker_engine.sampling.sampling_metadata import SamplingMetadata

#: Placeholder for a token that cannot be chosen.
_NONE: Final = -1


def sample(
    logits: torch.Tensor, choices: Sequence[SamplingMetadata | None], rows_at_once: int, kernels: Kernels
) -> list[Sampled]:
    """Sample each row, and return one result per row.

    Args:
        logits: [rows, vocabulary] float32, or bfloat16 if `kernels.argmax` supports it, unmodified logits of the model.
            They may be overwritten.
        choices: how to choose in each row; None: only the most likely token.
        rows_at_once: maximum number of rows per pass, see `sizing.activations.sampler_rows`.
        kernels: kernels for the device of the logits.
    """
    sampled: list[Sampled] = []
    for part in _parts(len(choices), rows_at_once):
        sampled += _sample(logits[part], choices[part], rows_at_once, kernels)
    return sampled


def greedy(best: torch.Tensor, largest: torch.Tensor) -> list[Sampled]:
    """Return the most likely token of each row, from the results of `kernels.argmax`."""
    if best.device.type == "cpu":  # Python is faster: the model evicts the code of torch's operators from CPU caches
        found = zip(best.tolist(), largest.tolist(), strict=True)
        return [Sampled([[token]]) if math.isfinite(largest_logit) else _corrupted() for token, largest_logit in found]
    tokens: list[int] = to_host(_possible(best, largest))
    return [_corrupted() if token == _NONE else Sampled([[token]]) for token in tokens]


def _possible(tokens: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the token of each row, or `_NONE` if none can be chosen."""
    return torch.where(largest.isfinite(), tokens, _NONE)


def _sample(
    logits: torch.Tensor, choices: Sequence[SamplingMetadata | None], rows_at_once: int, kernels: Kernels
) -> list[Sampled]:
    best, largest = kernels.argmax(logits)
    if all(choice is None for choice in choices):
        return greedy(best, largest)
    logits = logits.float()
    beams = [(row, choice) for row, choice in enumerate(choices) if choice is not None and choice.num_candidates]
    drawing = [(row, choice) for row, choice in enumerate(choices) if choice is not None and not choice.num_candidates]
    offers: list[list[tuple[int, float]]] = []
    chosen: list[Sampled] = []
    if beams:
        rows = [row for row, _ in beams]
        counts = [beam.num_candidates for _, beam in beams]
        offers = candidates(_rows(logits, rows), _rows(best, rows), counts, kernels.logprobs)
    if drawing:
        rows = [row for row, _ in drawing]
        of_rows = _rows(best, rows), _rows(largest, rows)
        chosen = _choose(_rows(logits, rows), [choice for _, choice in drawing], *of_rows, rows_at_once, kernels)
    if len(drawing) == len(choices):
        return chosen
    sampled = greedy(best, largest)
    for (row, _), offer in zip(beams, offers, strict=True):
        if not sampled[row].is_corrupted:
            sampled[row] = Sampled([], candidates=offer)
    for (row, _), row_sampled in zip(drawing, chosen, strict=True):
        sampled[row] = row_sampled
    return sampled


def _choose(
    logits: torch.Tensor,
    choices: list[SamplingMetadata],
    best: torch.Tensor,
    largest: torch.Tensor,
    rows_at_once: int,
    kernels: Kernels,
) -> list[Sampled]:
    """Choose tokens in rows without beams. A row may have several samples.

    Args:
        best, largest: most likely token and largest logit of each unmodified row.
    """
    constrained = _constrained(logits, choices, kernels)
    processed = process_logits(constrained, choices)
    if processed is not logits or any(c.allowed is not None for c in choices):
        best, processed_largest = kernels.argmax(processed)
        largest = torch.where(largest.isfinite(), processed_largest, largest)

    samples = [(row, i) for row, c in enumerate(choices) for i in range(c.num_samples)]
    draws: dict[int, Draw] = {}  # by sample index
    for sample_index, (row, i) in enumerate(samples):
        c = choices[row]
        if (p := c.params).temperature > 0:
            draws[sample_index] = Draw(p.temperature, p.top_k, p.top_p, p.min_p, c.seed + i, len(c.known))
    sample_rows = [row for row, _ in samples]
    found = _rows(best, sample_rows)
    drawn_samples = list(draws)
    for part in _parts(len(draws), rows_at_once):
        of_part = drawn_samples[part]
        drawn = draw(
            _rows(processed, [sample_rows[sample_index] for sample_index in of_part]),
            list(draws.values())[part],
            kernels,
        )
        found = drawn if len(drawn) == len(samples) else found.index_copy(0, to_device(of_part, found.device), drawn)
    tokens: list[int] = to_host(_possible(found, _rows(largest, sample_rows)))

    with_logprobs = [
        (sample_index, p.logprobs)
        for sample_index, (row, _) in enumerate(samples)
        if tokens[sample_index] != _NONE and (p := choices[row].params).logprobs is not None
    ]
    logprobs: dict[int, TokenLogprobs] = {}
    for part in _parts(len(with_logprobs), rows_at_once):
        of_part = [sample_index for sample_index, _ in with_logprobs[part]]
        rows = _rows(logits, [sample_rows[sample_index] for sample_index in of_part])
        counts = [count for _, count in with_logprobs[part]]
        part_logprobs = token_logprobs(
            rows, [tokens[sample_index] for sample_index in of_part], counts, kernels.logprobs
        )
        logprobs.update(zip(of_part, part_logprobs, strict=True))

    sampled, sample_index = [], 0
    for c in choices:
        own_samples = range(sample_index, sample_index + c.num_samples)
        sample_index += c.num_samples
        if any(tokens[p] == _NONE for p in own_samples):
            sampled.append(_corrupted())
            continue
        of_row = [[logprobs[p]] for p in own_samples if p in logprobs]
        sampled.append(Sampled([[tokens[p]] for p in own_samples], of_row or None))
    return sampled


def _constrained(logits: torch.Tensor, choices: list[SamplingMetadata], kernels: Kernels) -> torch.Tensor:
    """Apply the masks of grammars, in place unless log-probabilities need the unmodified logits."""
    masks = [(row, c.allowed) for row, c in enumerate(choices) if c.allowed is not None]
    if not masks:
        return logits
    if any(c.params.logprobs is not None for c in choices):
        logits = logits.clone()
    rows = to_device([row for row, _ in masks], logits.device)
    kernels.keep_allowed(logits, rows, to_device(np.stack([allowed for _, allowed in masks]), logits.device))
    return logits


def _corrupted() -> Sampled:
    return Sampled([], is_corrupted=True)


def _parts(count: int, at_once: int) -> Iterator[slice]:
    """Split `count` items into slices of at most `at_once`."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Select rows; without a copy if all are selected."""
    return values if rows == list(range(len(values))) else values[to_device(rows, values.device)]
