"""Chooses the next tokens of a batch, vectorized: greedy, sampled, or as candidates of beams.

A limited number of rows is processed at a time, which bounds a step's memory besides its logits (`sizing.activations`).

A token is chosen only if the row's largest logit is finite. NaN, +inf, or -inf in all places means that weights or
activations are corrupted, and no token can be chosen. The check is free, since the largest logit is computed anyway.
Single logits of -inf are valid. If all tokens that the request allows have one, the request gets an error of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.parallel.transfer import HostCopy, all_to_device, to_device
from stoker_engine.sampling.draw import Draw, draw
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.logprobs import candidates, token_logprobs
from stoker_engine.sampling.sampling_metadata import SamplingMetadata

#: In place of a token that cannot be chosen: logits are corrupted; or those of all tokens that are allowed are -inf.
NO_TOKEN: Final = -1
NONE_ALLOWED: Final = -2

#: Error of a request for `NONE_ALLOWED`.
_NONE_ALLOWED_ERROR: Final = (
    "no token can be chosen: the model's logits are -inf for all tokens that allowed_token_ids or the grammar allows"
)


@dataclass(frozen=True)
class Samples:
    """Tokens of rows of logits, which the device may still compute.

    Attributes:
        tokens: returns the first sampled token of each row on the device, int64 [rows]; `NO_TOKEN` or `NONE_ALLOWED`
            if none can be chosen; `NO_TOKEN` for beams.
        collect: waits for the device, and returns one result per row.
    """

    tokens: Callable[[], torch.Tensor]
    collect: Callable[[], list[Sampled]]


def sample(
    logits: torch.Tensor, choices: Sequence[SamplingMetadata | None], rows_at_once: int, kernels: Kernels
) -> Samples:
    """Start to sample each row.

    Args:
        logits: [rows, vocabulary] float32, or bfloat16 if `kernels.argmax` supports it, unmodified logits of the model.
            They may be overwritten.
        choices: how to choose in each row; None: only the most likely token.
        rows_at_once: maximum number of rows per pass, see `sizing.activations.sampler_rows`.
        kernels: kernels for the device of the logits.
    """
    parts = [_sample(logits[part], choices[part], rows_at_once, kernels) for part in _parts(len(choices), rows_at_once)]
    return joined(parts)


def joined(parts: list[Samples]) -> Samples:
    """Return the samples of several tensors of logits as one."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        lambda: torch.cat([part.tokens() for part in parts]),
        lambda: [sampled for part in parts for sampled in part.collect()],
    )


def replaced(samples: Samples, rows: Sequence[int] | np.ndarray, others: Samples) -> Samples:
    """Return samples in which those of some rows, in ascending order, are `others`."""

    def tokens() -> torch.Tensor:
        found = samples.tokens()
        return found.index_copy(0, to_device(rows, found.device, torch.int64), others.tokens())

    def collect() -> list[Sampled]:
        found = samples.collect()
        for row, sampled in zip(rows, others.collect(), strict=True):
            found[row] = sampled
        return found

    return Samples(tokens, collect)


def draw_or_choose(
    logits: torch.Tensor, drawn: np.ndarray, parameters: np.ndarray, rows_at_once: int, kernels: Kernels
) -> Samples:
    """Start to draw a token in some rows, and to choose the most likely one in the others.

    Args:
        logits: see `sample`.
        drawn: int64 [count], ascending indices of the rows in which a token is drawn.
        parameters: float64 [count, parameters], see `kernels.select_token`.
        rows_at_once: see `sample`.
    """
    parts = list[Samples]()
    for part in _parts(len(logits), rows_at_once):
        begin, end = np.searchsorted(drawn, (part.start, part.stop))
        rows = logits[part]
        tokens, largest = kernels.argmax(rows)
        if begin < end:
            indices, of_rows = all_to_device([drawn[begin:end] - part.start, parameters[begin:end]], logits.device)
            if end - begin == len(rows):
                tokens = kernels.select_token(rows.float(), of_rows)
            else:
                tokens = tokens.index_copy(0, indices, kernels.select_token(rows[indices].float(), of_rows))
        parts.append(samples_of(tokens, largest))
    return joined(parts)


def samples_of(tokens: torch.Tensor, largest: torch.Tensor) -> Samples:
    """Return samples of one token per row.

    Args:
        tokens: int64 [rows].
        largest: float32 [rows], the largest logit of each row; if that is not finite, the row's token is not valid.
    """
    if tokens.device.type == "cpu":  # Python is faster: the model evicts the code of torch's operators from CPU caches
        return Samples(partial(valid_tokens, tokens, largest), partial(_results_on_cpu, tokens, largest))
    return already_chosen(valid_tokens(tokens, largest))


def already_chosen(tokens: torch.Tensor) -> Samples:
    """Return samples of tokens that a CUDA graph or another rank has chosen, int64 [rows]; `NO_TOKEN` or `NONE_ALLOWED`
    if none can be.

    The copy for the host is started at once. The memory of `tokens` may be overwritten afterwards, as far as the
    device has read it before.
    """
    return Samples(lambda: tokens, partial(_results, HostCopy(tokens)))


def _results_on_cpu(tokens: torch.Tensor, largest: torch.Tensor) -> list[Sampled]:
    found = zip(tokens.tolist(), largest.tolist(), strict=True)
    return [Sampled([[token]]) if math.isfinite(largest_logit) else _corrupted() for token, largest_logit in found]


def _results(tokens: HostCopy) -> list[Sampled]:
    return [Sampled([[token]]) if token >= 0 else _not_sampled(token) for token in tokens.values()]


def valid_tokens(tokens: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the token of each row, or `NO_TOKEN` if none can be chosen; see `samples_of`."""
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


def _sample(
    logits: torch.Tensor, choices: Sequence[SamplingMetadata | None], rows_at_once: int, kernels: Kernels
) -> Samples:
    best, largest = kernels.argmax(logits)
    if all(choice is None for choice in choices):
        return samples_of(best, largest)
    logits = logits.float()
    beams = [(row, choice) for row, choice in enumerate(choices) if choice is not None and choice.num_candidates]
    drawing = [(row, choice) for row, choice in enumerate(choices) if choice is not None and not choice.num_candidates]
    offers: Callable[[], list[list[tuple[int, float]]]] = list
    chosen: Samples | None = None
    if beams:
        rows = [row for row, _ in beams]
        counts = [beam.num_candidates for _, beam in beams]
        offers = candidates(_rows(logits, rows), _rows(best, rows), counts, kernels.logprobs)
    rows = [row for row, _ in drawing]
    if drawing:
        of_rows = _rows(best, rows), _rows(largest, rows)
        chosen = _choose(_rows(logits, rows), [choice for _, choice in drawing], *of_rows, rows_at_once, kernels)
        if len(drawing) == len(choices):
            return chosen
    likeliest = samples_of(best, largest)
    chosen_or_likeliest = likeliest if chosen is None else replaced(likeliest, rows, chosen)

    def collect() -> list[Sampled]:
        sampled = chosen_or_likeliest.collect()
        for (row, _), offer in zip(beams, offers(), strict=True):
            if not sampled[row].is_corrupted:
                sampled[row] = Sampled([], candidates=offer)
        return sampled

    def tokens() -> torch.Tensor:
        found = chosen_or_likeliest.tokens()
        return found.index_fill(0, to_device([row for row, _ in beams], found.device), NO_TOKEN) if beams else found

    return Samples(tokens, collect)


def _choose(
    logits: torch.Tensor,
    choices: list[SamplingMetadata],
    best: torch.Tensor,
    largest: torch.Tensor,
    rows_at_once: int,
    kernels: Kernels,
) -> Samples:
    """Choose tokens in rows without beams. A row may have several samples.

    Args:
        best, largest: most likely token and largest logit of each unmodified row.
    """
    constrained = _constrained(logits, choices, kernels)
    processed = process_logits(constrained, choices)
    processed_largest = largest
    if processed is not logits or any(c.allowed is not None for c in choices):
        best, processed_largest = kernels.argmax(processed)

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
    if processed_largest is not largest:
        found = torch.where(_rows(processed_largest, sample_rows).isfinite(), found, NONE_ALLOWED)
    possible = valid_tokens(found, _rows(largest, sample_rows))
    tokens = HostCopy(possible)

    with_logprobs = [
        (sample_index, count)
        for sample_index, (row, _) in enumerate(samples)
        if (count := choices[row].params.logprobs) is not None
    ]
    logprobs = list[Callable[[], list[TokenLogprobs]]]()
    for part in _parts(len(with_logprobs), rows_at_once):
        of_part = [sample_index for sample_index, _ in with_logprobs[part]]
        rows = _rows(logits, [sample_rows[sample_index] for sample_index in of_part])
        counts = [count for _, count in with_logprobs[part]]
        # Log-probabilities of rows in which no token can be chosen are computed for a valid token, and not used.
        of_tokens = _rows(possible, of_part).clamp_min(0)
        logprobs.append(token_logprobs(rows, of_tokens, counts, kernels.logprobs))

    def first_tokens() -> torch.Tensor:
        firsts = [sample_index for sample_index, (_, i) in enumerate(samples) if i == 0]
        return _rows(possible, firsts)

    def collect() -> list[Sampled]:
        computed = (found for part in logprobs for found in part())
        by_sample = dict(zip([sample_index for sample_index, _ in with_logprobs], computed, strict=True))
        sampled, sample_index, chosen = list[Sampled](), 0, tokens.values()
        for c in choices:
            own_samples = range(sample_index, sample_index + c.num_samples)
            sample_index += c.num_samples
            if (lowest := min(chosen[p] for p in own_samples)) < 0:
                sampled.append(_not_sampled(lowest))
                continue
            of_row = [[by_sample[p]] for p in own_samples if p in by_sample]
            sampled.append(Sampled([[chosen[p]] for p in own_samples], of_row or None))
        return sampled

    return Samples(first_tokens, collect)


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


def _not_sampled(token: int) -> Sampled:
    """Return the result of a row without a token: of `NO_TOKEN` or `NONE_ALLOWED`."""
    return Sampled([], error=_NONE_ALLOWED_ERROR) if token == NONE_ALLOWED else _corrupted()


def _parts(count: int, at_once: int) -> Iterator[slice]:
    """Split `count` items into slices of at most `at_once`."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Select rows; without a copy if all are selected."""
    return values if rows == list(range(len(values))) else values[to_device(rows, values.device)]
