"""The sampler, compared with plain definitions of its parameters, and transformers' logits processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.step import Sampled
from stoker_engine.exec.finish.verify_draft import verify_draft
from stoker_engine.kernels.select import select_kernels
from stoker_engine.kernels.select_token import keep_likely
from stoker_engine.sampling.draw import Draw, selection, stream, uniforms
from stoker_engine.sampling.draw import draw as draw_rows
from stoker_engine.sampling.logits import process_logits
from stoker_engine.sampling.sampler import sample as sample_rows
from stoker_engine.sampling.sampling_metadata import SamplingMetadata


def _sequence(known: list[int] | None = None, prompt: int = 1, **fields: Any) -> SamplingMetadata:
    known = known or [0]
    seed, num_samples = fields.pop("seed", 0), fields.pop("num_samples", 1)
    bad_words, end_tokens = fields.pop("bad_words", ()), fields.pop("end_tokens", ())
    allowed = fields.pop("allowed", None)
    params = SamplingParams(**fields, min_tokens=9 if end_tokens else 0)
    request = EngineRequest("r", known[:prompt], params, 16, eos_token_ids=frozenset(end_tokens), bad_words=bad_words)
    rules = LogitRules.of(request)
    counts = None if rules is None else rules.counts(known[:prompt])
    for token in known[prompt:]:
        if counts is not None:
            counts.add(token)
    may_end = not end_tokens
    return SamplingMetadata(params, seed, known, prompt, num_samples, rules, counts, may_end=may_end, allowed=allowed)


#: The kernels that the engine uses on this machine.
KERNELS = select_kernels(torch.device("cpu"), torch.float32)


def sample(logits: torch.Tensor, choices: list[SamplingMetadata], at_once: int = 64) -> list[Sampled]:
    return sample_rows(logits, choices, at_once, KERNELS).collect()


def _draw(seed: int = 0, position: int = 1, **fields: Any) -> Draw:
    return Draw(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}, seed=seed, position=position)


def draw(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    return draw_rows(logits, draws, KERNELS)


def _kept(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    parameters = [selection(d.temperature, d.top_k, d.top_p, d.min_p) for d in draws]
    return keep_likely(logits, torch.tensor(parameters, dtype=torch.float64))


def _kept_by_definition(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Walk down from the likeliest token; stop at k tokens, or once their probability reaches p."""
    order = logits.argsort(descending=True).tolist()
    probs = logits.double().softmax(-1)
    order = [token for token in order if probs[token] >= min_p * probs.max()]
    if top_k > 0:
        order = order[:top_k]
    kept, total, whole = set(), 0.0, float(probs[order].sum())
    for token in order:
        if kept and total >= top_p * whole and top_p < 1:
            break
        kept.add(token)
        total += float(probs[token])
    return kept


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-1, 40),
            st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
            st.sampled_from([0.0, 0.0, 0.013, 0.21]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
    vocabulary=st.sampled_from([30, 1500, 3000]),
)
def test_top_k_top_p_and_min_p_keep_the_tokens_of_their_definition(
    rows: list[tuple[int, float, float]], seed: int, vocabulary: int
) -> None:
    logits = torch.randn(len(rows), vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    logits -= logits.amax(-1, keepdim=True)
    draws = [_draw(top_k=k, top_p=p, min_p=m) for k, p, m in rows]
    kept = _kept(logits, draws)
    for row, (k, p, m) in enumerate(rows):
        assert set(torch.isfinite(kept[row]).nonzero().flatten().tolist()) == _kept_by_definition(logits[row], k, p, m)


def test_min_p_equals_that_of_transformers() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)) * 3
    expected = MinPLogitsWarper(min_p=0.1)(None, logits)
    found = _kept(logits - logits.amax(-1, keepdim=True), [_draw(min_p=0.1)] * 4)
    assert torch.equal(expected.isfinite(), found.isfinite())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5]).repeat(4000, 1)
    drawn = draw(logits.clone(), [_draw(seed=s, temperature=0.7) for s in range(4000)])
    shares = drawn.bincount(minlength=5) / 4000
    assert torch.allclose(shares, (logits[0] / 0.7).softmax(-1), atol=0.03)


def test_random_numbers_are_those_of_splitmix64() -> None:
    """Compared with the numbers that its authors publish for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4))
    assert found.tolist() == [(number >> 11) / 2**53 for number in published]


def test_random_numbers_of_seeds_and_positions_are_independent() -> None:
    """Neighbouring seeds have streams of their own, which do not overlap."""
    seeds = [-(2**63), -1, 0, 1, 2, 3, 2**31, 2**63 - 1, 2**64 + 7]
    positions = np.arange(4000)
    found = np.array([uniforms(np.full(len(positions), stream(seed)), positions) for seed in seeds])
    assert ((found >= 0) & (found < 1)).all()
    assert len(np.unique(found)) == found.size
    assert np.abs(found.mean(1) - 0.5).max() < 0.02
    together = np.corrcoef(np.concatenate([found, np.roll(found, 1, axis=1)]))
    assert np.abs(together - np.eye(len(together))).max() < 0.07


def test_draws_over_a_large_vocabulary_invert_the_cumulative_distribution() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2))
    draws = [_draw(seed=s) for s in range(64)]
    drawn = draw(logits.clone(), draws)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    for row, token in enumerate(drawn.tolist()):
        [u] = uniforms(np.array([stream(draws[row].seed)]), np.array([draws[row].position]))
        assert (cumulative[row, token - 1] if token else 0) - 1e-6 <= u <= cumulative[row, token] + 1e-6


def test_seeded_draw_is_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(3))
    params = [
        {"temperature": 0.1 + row / 10, "top_k": row % 3 * 7, "top_p": (1.0, 0.9)[row % 2], "min_p": 0.01 * (row % 4)}
        for row in range(20)
    ]
    sequences = [_sequence(seed=row, **fields) for row, fields in enumerate(params)]
    together = [s.token_ids for s in sample(logits, sequences)]
    alone = [sample(logits[row : row + 1], [sequences[row]])[0].token_ids for row in range(20)]
    assert together == alone


def test_draws_among_ties_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(4)).bfloat16().float().round()
    mine = _sequence(seed=5, top_k=20)
    alone = sample(logits[:1], [mine])[0].token_ids
    for beside in ({"top_k": 900}, {"top_p": 0.5}, {"top_p": 0.999}, {"temperature": 0.0}):
        assert sample(logits, [mine, _sequence(seed=6, **beside)])[0].token_ids == alone


def test_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
    sampled = sample(logits, [_sequence(temperature=t) for t in (1e-45, 1e-20, 1e-6)])
    assert [s.token_ids[0][0] for s in sampled] == logits.argmax(-1).tolist()


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(6))
    known = [5, 9, 9, 31, 5, 2]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([known]), logits.clone())
    found = process_logits(logits, [_sequence(known, prompt=3, repetition_penalty=1.7)])
    assert torch.allclose(found, expected)


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    logits = torch.zeros(2, 10)
    known = [1, 2, 2, 3, 3, 3, 4]  # the first three are the prompt
    [first, second] = process_logits(
        logits,
        [_sequence(known, prompt=3, frequency_penalty=0.5, presence_penalty=0.25), _sequence(known, prompt=3)],
    )
    assert first.tolist() == [0, 0, 0, -1.75, -0.75, 0, 0, 0, 0, 0]
    assert not second.any()


def test_bad_words_equal_those_of_transformers() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(7))
    words = [[4], [7, 8], [9, 9, 10], [7, 7, 11]]
    for known in ([1, 2, 7], [1, 9, 9], [1, 2, 3], [1, 7, 7]):
        expected = NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([known]), logits.clone())
        found = process_logits(logits, [_sequence(known, bad_words=tuple(map(tuple, words)))])
        assert torch.equal(found, expected)


def test_bad_words_starting_in_the_prompt_are_not_forbidden() -> None:
    logits = torch.zeros(1, 10)
    assert not torch.isinf(process_logits(logits, [_sequence([7], prompt=1, bad_words=((7, 8),))])).any()


def test_bias_allowed_tokens_and_end_tokens_change_the_logits() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(8))
    sequences = [
        _sequence(logit_bias={3: 5.0, 4: -100.0}),
        _sequence(allowed_token_ids=(2, 6)),
        _sequence(end_tokens=(int(logits[2].argmax()),)),
        _sequence(allowed_token_ids=(2,), end_tokens=(2,)),
    ]
    changed = process_logits(logits, sequences)
    assert changed[0, 3] == logits[0, 3] + 5 and changed[0, 4] == logits[0, 4] - 100
    assert changed[1].isfinite().nonzero().flatten().tolist() == [2, 6]
    assert changed[2].argmax() != logits[2].argmax()
    assert changed[3].isfinite().nonzero().flatten().tolist() == [2]  # there is no other choice


def test_few_and_many_end_tokens_are_forbidden_alike() -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(13))
    ends = tuple(range(0, 3000, 2)), (4, 6), tuple(range(3000))
    changed = process_logits(logits, [_sequence(end_tokens=tokens) for tokens in ends])
    for row, tokens in enumerate(ends[:2]):
        assert (changed[row] == -torch.inf).nonzero().flatten().tolist() == list(tokens)
    assert torch.equal(changed[2], logits[2])  # there is no other choice


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nan_or_infinity_are_reported_and_others_unchanged(temperature: float, number: float) -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(12))
    logits[:, 2999] = -torch.inf  # single tokens may be ruled out
    asked: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"allowed_token_ids": [5, 6]}]
    sequences = [_sequence(seed=row, temperature=temperature, **asked[row % 3]) for row in range(6)]
    expected = sample(logits, sequences)
    broken = logits.clone()
    for row in (1, 3, 5):
        broken[row, 17 if number != -torch.inf else slice(None)] = number
    found = sample(broken, sequences)
    assert [s.is_corrupted for s in found] == [False, True] * 3
    assert [s.token_ids for s in found[::2]] == [s.token_ids for s in expected[::2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_whose_allowed_tokens_are_all_impossible_are_not_corrupted(temperature: float) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(14))
    logits[:, 5] = logits[5, 17] = -torch.inf
    logits[2] = torch.nan
    mask = np.array([1 << 5, 0], dtype=np.int32)
    fields: list[dict[str, Any]] = [
        {"allowed_token_ids": [5]},
        {},
        {"allowed_token_ids": [5]},
        {"allowed_token_ids": [5], "num_samples": 2, "logprobs": 1},
        {"allowed": mask},
        {"allowed_token_ids": [5, 17]},
    ]
    found = sample(logits, [_sequence(seed=row, temperature=temperature, **each) for row, each in enumerate(fields)])
    assert [s.is_corrupted for s in found] == [row == 2 for row in range(6)]
    for row, sampled in enumerate(found):
        assert (sampled.error is not None and "allowed_token_ids" in sampled.error) == (row not in (1, 2))
        assert len(sampled.token_ids) == (row == 1)


def test_a_draft_ends_where_no_token_is_allowed() -> None:
    """The next step reports the error, unless it occurs before the first drafted token."""
    fine, failed, corrupted = Sampled([[7]]), Sampled([], error="none"), Sampled([], is_corrupted=True)
    for draft, drawn, expected in (
        ([7, 7], [fine, failed, fine], Sampled([[7]])),
        ([7, 7], [failed, fine, fine], failed),
        ([7, 8], [fine, fine, failed], Sampled([[7, 7]])),
        ([7], [fine, corrupted], corrupted),
        ([], [failed], failed),
    ):
        assert verify_draft(drawn, draft, [None] * len(drawn)) == expected


def test_default_parameters_leave_the_logits_unchanged() -> None:
    logits = torch.randn(2, 20)
    assert process_logits(logits, [_sequence(), _sequence(temperature=0.0)]) is logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_models_own_distribution(temperature: float) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(9))
    asked = _sequence(temperature=temperature, logprobs=3, logit_bias={7: 50.0})
    found, none = sample(logits, [asked, _sequence()])
    reference = logits[0].log_softmax(-1)
    assert none.logprobs is None and found.logprobs is not None
    [[reported]] = found.logprobs
    assert found.token_ids == [[7]] and reported.token_ids[0] == 7
    assert reported.rank == int((reference > reference[7]).sum()) + 1
    assert reported.token_ids[1:] == reference.topk(3).indices.tolist()
    assert torch.allclose(torch.tensor(reported.logprobs), reference[reported.token_ids])


def test_several_samples_of_a_row_equal_those_of_consecutive_seeds() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(10))
    several = sample(logits, [_sequence(), _sequence(seed=40, num_samples=5), _sequence(temperature=0.0)])
    assert len(several[0].token_ids) == len(several[2].token_ids) == 1
    one_by_one = [sample(logits[1:2], [_sequence(seed=40 + i)])[0].token_ids[0] for i in range(5)]
    assert several[1].token_ids == one_by_one


def test_beams_return_their_likeliest_tokens() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(11))
    beam = SamplingMetadata(BeamSearchParams(2), 0, [1], 1, num_candidates=4)
    drawn, offered = sample(logits, [_sequence(), beam])
    assert drawn.candidates is None and offered.candidates is not None
    top = logits[1].log_softmax(-1).topk(4)
    assert [token for token, _ in offered.candidates] == top.indices.tolist()
    assert torch.allclose(torch.tensor([p for _, p in offered.candidates]), top.values)
