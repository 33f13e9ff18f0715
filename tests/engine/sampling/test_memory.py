"""Memory of sampling, compared with the planner's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.kernels.select import select_kernels
from stoker_engine.sampling.sampler import sample
from stoker_engine.sampling.sampling_metadata import SamplingMetadata
from stoker_engine.sizing import activations

KERNELS = select_kernels(torch.device("cpu"), torch.float32)

VOCABULARY, ROWS = 8_000, 12

#: Parameters with the most copies: rows are changed, and so flat that top-p must sort the whole vocabulary.
WORST = {"top_p": 0.999, "min_p": 1e-9, "logit_bias": {5: 1.0}, "repetition_penalty": 1.1}


def peak(run: Callable[[], object]) -> int:
    """Return the peak bytes of tensors during `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = highest = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def sequence(row: int, num_samples: int = 1, **fields: Any) -> SamplingMetadata:
    request = EngineRequest(str(row), [1, 2, 3], SamplingParams(**fields), 16)
    rules = LogitRules.of(request)
    counts = None if rules is None else rules.counts([1, 2, 3])
    return SamplingMetadata(request.params, row, [1, 2, 3], 3, num_samples, rules, counts)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {5: 1.0}},
        {},
        {"top_p": 0.9},
        WORST,
        {**WORST, "top_k": 7_900},
        {**WORST, "num_samples": 40},
        {"temperature": 0, "logprobs": VOCABULARY},
        {**WORST, "logprobs": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [3, ROWS])
def test_sampler_stays_within_the_planned_bytes(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], at_once: int
) -> None:
    monkeypatch.setattr(activations, "SAMPLER_LOGITS", at_once * VOCABULARY)
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) / 10
    sequences = [sequence(row, **asked) for row in range(ROWS)]
    rows_at_once = activations.sampler_rows(VOCABULARY, ROWS)
    peak_bytes = peak(lambda: sample(logits, sequences, rows_at_once, KERNELS).collect()) + logits.nbytes
    counted = activations.sampling_bytes(VOCABULARY, ROWS)
    assert peak_bytes <= counted, (
        f"{peak_bytes / VOCABULARY / 4:.1f} rows of logits, {counted / VOCABULARY / 4:.1f} counted"
    )
    if asked is WORST:
        assert peak_bytes > counted * 0.8  # and it does not count unused memory


def test_rows_draw_the_same_tokens_in_parts_and_at_once() -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)) / 2
    asked: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 9}, WORST, {"temperature": 0}, {"logprobs": 3}]
    sequences = [sequence(row, num_samples=1 + row % 3, **asked[row % len(asked)]) for row in range(ROWS)]
    together = sample(logits, sequences, ROWS * 3, KERNELS).collect()
    for at_once in (1, 2, 7):
        assert sample(logits, sequences, at_once, KERNELS).collect() == together
