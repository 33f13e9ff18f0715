"""The sampler against plain definitions of top-k, top-p and drawing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_engine.core.batch import ScheduledSequence
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.sampling.sampler import keep_top, sample


def _sequence(seed: int, position: int = 1, **params: float) -> ScheduledSequence:
    return ScheduledSequence("r", [0], position - 1, [0], True, SamplingParams(**params), seed)  # type: ignore[arg-type]


def _kept_by_definition(logits: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """Walk down from the likeliest token; stop at k tokens, or once their probability reaches p."""
    order = logits.argsort(descending=True).tolist()
    if top_k > 0:
        order = order[:top_k]
    probs = logits[order].double().softmax(-1).tolist()
    kept, total = set(), 0.0
    for token, prob in zip(order, probs, strict=True):
        if kept and total >= top_p and top_p < 1:
            break
        kept.add(token)
        total += prob
    return kept


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 40), st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0])), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
)
def test_top_k_and_top_p_keep_what_their_definition_says(rows: list[tuple[int, float]], seed: int) -> None:
    logits = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(seed)) * 3
    kept = keep_top(logits, [k for k, _ in rows], [p for _, p in rows])
    for row, (top_k, top_p) in enumerate(rows):
        assert set(kept[row].isfinite().nonzero().flatten().tolist()) == _kept_by_definition(logits[row], top_k, top_p)
        finite = kept[row].isfinite()
        assert torch.equal(kept[row][finite], logits[row][finite])


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = [sample(logits, [_sequence(seed, temperature=0.7)])[0] for seed in range(4000)]
    observed = torch.bincount(torch.tensor(draws), minlength=4) / 4000
    assert torch.allclose(observed, (logits[0] / 0.7).softmax(-1), atol=0.03)


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sequences = [_sequence(seed, temperature=t) for seed, t in enumerate([0.0, 1.0, 0.3, 0.0, 2.0, 1.0])]
    alone = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]
    assert sample(logits, sequences) == alone


def test_extreme_temperatures_draw_a_valid_token() -> None:
    logits = torch.tensor([[1e30, -1e30, 3.0]])
    for temperature in (1e-30, 1e-5, 1e30):
        assert sample(logits, [_sequence(1, temperature=temperature)])[0] in range(3)
    assert sample(logits, [_sequence(1, temperature=1e-30)]) == [0]


def test_positions_draw_independently() -> None:
    logits = torch.zeros(1, 1000)
    assert len({sample(logits, [_sequence(3, position, temperature=1.0)])[0] for position in range(1, 21)}) > 15
