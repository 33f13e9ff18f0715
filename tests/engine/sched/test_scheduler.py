"""The scheduler with a fake model (`fake_model`), under hypothesis' workloads."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_common.block_hash import NO_KEYS, CacheKeys, ContentSpan
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import Sampled, StepResult
from stoker_engine.sizing.cache_groups import NULL_BLOCK

from .fake_model import (
    BLOCK,
    FULL,
    HYBRID,
    ONLY_STATES,
    STATES,
    FakeModel,
    Oracle,
    beams,
    expected,
    sampling,
)


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    fake_model = FakeModel(tokens=8)
    fake_model.add(sampling("short", [1, 2], max_tokens=20))
    fake_model.step()
    fake_model.add(sampling("long", list(range(30))))
    for _ in range(5):
        fake_model.step()
    shares = [{s.id: len(s.token_ids) for s in batch.sequences} for batch in fake_model.batches[1:]]
    assert shares[:4] == [{"short#0": 1, "long#0": 7}] * 4
    assert shares[4] == {"short#0": 1, "long#0": 2}


def test_prompts_share_the_tokens_left_by_decodes() -> None:
    fake_model = FakeModel(num_blocks=200, tokens=40, long_prefill_token_threshold=8)
    fake_model.add(sampling("stream", [1, 2], max_tokens=20))
    fake_model.step()
    for name in ("a", "b"):
        fake_model.add(sampling(name, [ord(name) % 50] * 20, max_tokens=1))
    shares = []
    while len(fake_model.finished) < 2:
        fake_model.step()
        shares.append({s.id: len(s.token_ids) for s in fake_model.batches[-1].sequences})
    assert [share["stream#0"] for share in shares] == [1] * len(shares)
    prompts = [{name: count for name, count in share.items() if name != "stream#0"} for share in shares]
    assert prompts == [{"a#0": 8}, {"a#0": 8}, {"a#0": 4, "b#0": 4}, {"b#0": 8}, {"b#0": 8}]


def test_prompts_have_the_whole_step_without_decodes() -> None:
    fake_model = FakeModel(num_blocks=200, tokens=40, long_prefill_token_threshold=8)
    for name in ("a", "b"):
        fake_model.add(sampling(name, [ord(name) % 50] * 60, max_tokens=1))
    for _ in range(3):
        fake_model.step()
    assert [batch.num_tokens for batch in fake_model.batches] == [40, 40, 40]


def test_prompts_progress_beside_as_many_decodes_as_a_step_has_tokens() -> None:
    fake_model = FakeModel(num_blocks=200, seqs=12, tokens=8)
    for index in range(7):
        fake_model.add(sampling(str(index), [index], max_tokens=20))
    fake_model.step()
    fake_model.add(sampling("urgent", [40] * 20, max_tokens=1))
    fake_model.scheduler.waiting.first().sort_key = (-1, 0)  # before all decodes
    fake_model.step()
    assert [len(s.token_ids) for s in fake_model.batches[-1].sequences] == [1] * 8


def test_running_prompt_yields_to_a_higher_priority() -> None:
    fake_model = FakeModel(num_blocks=200, tokens=40, policy="priority", long_prefill_token_threshold=8)
    fake_model.add(sampling("stream", [1, 2], max_tokens=30, priority=0))
    fake_model.step()
    fake_model.add(sampling("low", [3] * 40, max_tokens=1, priority=2))
    fake_model.step()
    fake_model.add(sampling("high", [4] * 12, max_tokens=1, priority=1))
    shares = []
    for _ in range(3):
        fake_model.step()
        shares.append({s.id: len(s.token_ids) for s in fake_model.batches[-1].sequences if s.id != "stream#0"})
    assert shares == [{"high#0": 8}, {"high#0": 4, "low#0": 4}, {"low#0": 8}]
    fake_model.drain()
    assert fake_model.result("low") == expected(sampling("low", [3] * 40, max_tokens=1, priority=2))


def test_withdrawn_admission_counts_as_one_lookup() -> None:
    fake_model = FakeModel(num_blocks=64, tokens=40, enable_chunked_prefill=False)
    fake_model.add(sampling("stream", [1] * 30, max_tokens=12))
    fake_model.step()
    fake_model.add(sampling("whole", [2] * 40, max_tokens=1))  # does not fit into a step beside the stream
    fake_model.drain()
    assert len(fake_model.batches) > 10
    assert fake_model.scheduler.stats().prefix_cache_queries == 70


def test_without_chunked_prefill_a_prompt_is_computed_whole() -> None:
    fake_model = FakeModel(tokens=32, enable_chunked_prefill=False)
    for name in "abc":
        fake_model.add(sampling(name, [ord(name) % 50] * 20))
    fake_model.drain()
    assert [len(batch.sequences) for batch in fake_model.batches[:3]] == [1, 2, 3]
    assert all(len(s.token_ids) in (1, 20) for batch in fake_model.batches for s in batch.sequences)


def test_last_request_is_preempted_and_still_finishes() -> None:
    fake_model = FakeModel(num_blocks=8, prefix=False)
    requests = [sampling(name, [1] * 8, max_tokens=16) for name in "ab"]
    for request in requests:
        fake_model.add(request)
    fake_model.drain()
    assert fake_model.scheduler.num_preemptions > 0
    assert [fake_model.result(request.id) for request in requests] == [expected(request) for request in requests]


def test_high_priority_is_served_first_and_preempted_last() -> None:
    fake_model = FakeModel(num_blocks=8, seqs=2, prefix=False, policy="priority")
    for name, priority in (("low", 5), ("middle", 1), ("high", -3)):
        fake_model.add(sampling(name, [priority + 10] * 8, max_tokens=16, priority=priority))
    fake_model.step()
    assert [s.id for s in fake_model.batches[0].sequences] == ["high#0", "middle#0"]
    fake_model.drain()
    ended = [name for batch in fake_model.batches for name in [s.id for s in batch.sequences]]
    assert ended.index("low#0") > ended.index("middle#0")
    last_seen = {name: max(i for i, other in enumerate(ended) if other == name) for name in set(ended)}
    assert last_seen["high#0"] < last_seen["middle#0"] < last_seen["low#0"]


@pytest.mark.parametrize("groups", [FULL, HYBRID, STATES, ONLY_STATES])
def test_a_prompt_is_computed_once_for_all_its_sequences(groups: tuple) -> None:
    fake_model = FakeModel(num_blocks=200, groups=groups, prefix=False)
    request = sampling("r", list(range(30)), max_tokens=12, n=5)
    fake_model.add(request)
    fake_model.drain()
    assert fake_model.result("r") == expected(request)
    computed = sum(batch.num_tokens for batch in fake_model.batches)
    assert computed == 30 + 5 * 11  # the last tokens are never computed
    assert len({tuple(output) for output in fake_model.result("r")}) == 5


def test_forks_copy_the_block_they_share_only_when_they_write_into_it() -> None:
    fake_model = FakeModel(prefix=False)
    fake_model.add(sampling("r", list(range(2 * BLOCK + 1)), max_tokens=3, n=4))
    fake_model.step()
    assert fake_model.scheduler.kv.pool.num_usable - fake_model.scheduler.kv.pool.num_free == 3
    fake_model.step()
    assert len(fake_model.batches[-1].copies) == 3  # the last of the four writes in place
    assert fake_model.scheduler.kv.pool.num_usable - fake_model.scheduler.kv.pool.num_free == 2 + 4


def test_sequences_beyond_max_num_seqs_wait() -> None:
    fake_model = FakeModel(seqs=3)
    request = sampling("r", list(range(9)), max_tokens=6, n=8)
    fake_model.add(request)
    fake_model.drain()
    assert fake_model.result("r") == expected(request)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_beams_equal_those_of_the_plain_search(groups: tuple, early_stopping: object, num_blocks: int) -> None:
    fake_model = FakeModel(num_blocks=num_blocks, groups=groups)
    submitted = [beams(name, [3, 4, ord(name) % 40, 6, 7], 4, 12, early_stopping=early_stopping) for name in "abc"]
    for request in submitted:
        fake_model.add(request)
    fake_model.drain()
    for request in submitted:
        assert fake_model.result(request.id) == expected(request)


def test_windows_release_the_blocks_they_have_passed() -> None:
    fake_model = FakeModel(num_blocks=64, groups=HYBRID, prefix=False)
    fake_model.add(sampling("r", list(range(40)), max_tokens=20))
    most_used = 0
    while fake_model.scheduler.has_work:
        fake_model.step()
        most_used = max(most_used, fake_model.scheduler.kv.pool.num_usable - fake_model.scheduler.kv.pool.num_free)
    full, wide, narrow = 15, 2 * (16 + 10) // BLOCK + 4, (16 + 3) // BLOCK + 2
    assert most_used <= full + wide + narrow < 4 * full


def test_prefix_hits_although_blocks_before_its_window_are_gone() -> None:
    fake_model = FakeModel(num_blocks=40, groups=HYBRID)
    prompt = list(range(40))
    fake_model.add(sampling("first", prompt, max_tokens=2))
    fake_model.drain()
    again = sampling("again", [*prompt[:32], 1, 2, 3], max_tokens=2)
    fake_model.add(again)
    fake_model.step()
    assert fake_model.batches[-1].sequences[0].start == 32
    assert fake_model.batches[-1].sequences[0].blocks[3][:7] == [NULL_BLOCK] * 7
    fake_model.drain()
    assert fake_model.result("again") == expected(again)


def test_a_new_prefix_is_computed_once_within_a_step() -> None:
    fake_model = FakeModel(num_blocks=400, seqs=32, tokens=1200)
    shared = [random.Random(0).randrange(50) for _ in range(1024)]
    for index in range(32):
        fake_model.add(sampling(str(index), [*shared, index], max_tokens=1))
    fake_model.step()
    assert [len(s.token_ids) for s in fake_model.batches[0].sequences] == [1] * 31 + [1025]


def test_a_salt_keeps_prefixes_apart() -> None:
    fake_model = FakeModel(num_blocks=64)
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        fake_model.add(sampling(name, list(range(13)), max_tokens=1, cache_keys=CacheKeys(salt)))
        fake_model.drain()
    assert [batch.sequences[0].start for batch in fake_model.batches] == [0, 0, 12]


def test_root_keys_and_content_keep_prefixes_apart() -> None:
    fake_model = FakeModel(num_blocks=64)
    image, other_image = ContentSpan(5, 9, b"image"), ContentSpan(5, 9, b"other")
    keys = [
        CacheKeys(root_key=b"adapter 1"),
        CacheKeys("adapter 1"),
        CacheKeys(root_key=b"adapter 1"),
        CacheKeys(spans=(image,)),
        CacheKeys(spans=(other_image,)),
        CacheKeys(spans=(image,)),
        NO_KEYS,
    ]
    for index, each in enumerate(keys):
        fake_model.add(sampling(str(index), list(range(13)), max_tokens=1, cache_keys=each))
        fake_model.drain()
    # The other image shares the preceding block.
    assert [batch.sequences[0].start for batch in fake_model.batches] == [0, 0, 12, 0, 4, 12, 4]


def test_prompt_logprobs_read_no_cached_prefix() -> None:
    fake_model = FakeModel(num_blocks=64)
    for name in "ab":
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        fake_model.add(EngineRequest(name, list(range(13)), params, 1))
        fake_model.drain()
    assert [batch.sequences[0].start for batch in fake_model.batches] == [0, 0]


def test_few_slots_are_unused() -> None:
    """On a ShareGPT-like mix of lengths (log-normal, mean about 330 tokens) less than 4% of the slots are unused."""
    rng = random.Random(0)
    fake_model = FakeModel(num_blocks=100_000, seqs=256, tokens=8192, prefix=False)
    block = 16
    fake_model.scheduler.kv.block_size = block
    lengths = [min(4096, max(4, int(rng.lognormvariate(5.4, 0.9)))) for _ in range(256)]
    for index, length in enumerate(lengths):
        fake_model.add(sampling(str(index), [index % 50] * length, max_tokens=400))
    known = held = 0
    for _ in range(40):
        scheduled = fake_model.scheduler.schedule()
        assert scheduled is not None
        samples = [count for count in scheduled.step.num_samples if count]
        fake_model.scheduler.commit(scheduled, StepResult([Sampled([[1]]) for _ in samples]))
        pool = fake_model.scheduler.kv.pool
        known += sum(sequence.num_computed for sequence in fake_model.scheduler.running)
        held += (pool.num_usable - pool.num_free) * block
    waste = 1 - known / held
    assert 0 < waste < 0.04, f"{waste:.1%} of the slots are unused"


def test_a_step_is_scheduled_while_another_is_in_flight() -> None:
    fake_model = FakeModel(in_flight=2)
    fake_model.add(sampling("r", list(range(20)), max_tokens=5))
    fake_model.launch()
    assert fake_model.scheduler.num_in_flight == 2  # both chunks of the prompt
    fake_model.drain()
    assert fake_model.result("r") == expected(sampling("r", list(range(20)), max_tokens=5))
    assert [batch.num_tokens for batch in fake_model.batches] == [16, 4, 1, 1, 1, 1]  # no extra step at the end


def test_steps_in_flight_after_the_end_of_a_sequence_are_discarded() -> None:
    request = sampling("r", [1, 2, 3], max_tokens=40)
    end = expected(request)[0][7]
    ended = sampling("r", [1, 2, 3], max_tokens=40, eos_token_ids=frozenset({end}))
    fake_model = FakeModel(in_flight=2)
    fake_model.add(ended)
    fake_model.drain()
    assert fake_model.result("r") == expected(ended)
    computed = len(expected(ended)[0])
    assert len(fake_model.batches) == computed + 1  # the extra step was unpredictable


def test_a_prefix_is_shared_while_the_step_that_computes_it_is_in_flight() -> None:
    fake_model = FakeModel(num_blocks=400, seqs=40, tokens=512, in_flight=2)
    shared = [random.Random(0).randrange(50) for _ in range(1024)]
    for index in range(32):
        fake_model.add(sampling(str(index), [*shared, index], max_tokens=2))
    fake_model.drain()
    assert sum(batch.num_tokens for batch in fake_model.batches) == 1024 + 32 + 32
    for index in range(32):
        assert fake_model.result(str(index)) == expected(sampling(str(index), [*shared, index], max_tokens=2))


@pytest.mark.parametrize("ended", ["none", "the first", "the sharer"])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_blocks_with_nan_are_never_found(groups: tuple, in_flight: int, ended: str) -> None:
    """No later prompt finds the request's blocks from its NaN step on, or blocks that sharing requests add to them."""
    fake_model = FakeModel(num_blocks=400, tokens=200, in_flight=in_flight, groups=groups)
    prompt = list(range(30)) + list(range(10))
    fake_model.spoiled = {"bad"}
    fake_model.add(sampling("bad", prompt, max_tokens=9))
    shares = [sampling("b", [*prompt[:36], *range(20, 32)], max_tokens=6)]
    shares.append(sampling("c", [*shares[0].prompt_token_ids, *range(8)], max_tokens=6))
    for request in shares:
        fake_model.add(request)
    fake_model.launch()
    if in_flight > 1:  # otherwise the step has run
        aborted = {"none": "", "the first": "bad", "the sharer": "b"}[ended]
        fake_model.scheduler.finish(aborted, FinishReason.ABORT)
        shares = [request for request in shares if request.id != aborted]
    fake_model.drain()
    fake_model.add(sampling("later", [*range(30), *range(6), *range(20, 32), *range(8), 3], max_tokens=4))
    fake_model.drain()
    for request in (*shares, sampling("later", [*range(30), *range(6), *range(20, 32), *range(8), 3], max_tokens=4)):
        assert fake_model.result(request.id) == expected(request)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_requests_that_share_nan_blocks_restart(in_flight: int, groups: tuple) -> None:
    fake_model = FakeModel(num_blocks=400, tokens=64, in_flight=in_flight, groups=groups)
    prompt = list(range(30)) + list(range(10))
    fake_model.spoiled = {"bad"}
    fake_model.add(sampling("bad", prompt, max_tokens=9))
    submitted = [sampling(str(index), [*prompt[:36], index], max_tokens=6, n=1 + index % 3) for index in range(3)]
    submitted.append(beams("beams", [*prompt[:24], 7], 2, 5))
    for request in submitted:
        fake_model.add(request)
    fake_model.launch()
    assert any(request.num_cached for request in fake_model.scheduler.requests.values()), "no block was shared"
    fake_model.drain()
    for request in submitted:
        assert fake_model.result(request.id) == expected(request)
    assert fake_model.scheduler.num_corrupted == 1
    fake_model.spoiled = set()
    after = sampling("after", [*prompt[:36], 0, *range(9)], max_tokens=4)  # must not find the sharing requests' blocks
    fake_model.add(after)
    fake_model.drain()
    assert fake_model.result("after") == expected(after)
    fake_model.add(sampling("again", prompt, max_tokens=4))  # must not find any block
    fake_model.drain()
    assert fake_model.result("again") == expected(sampling("again", prompt, max_tokens=4))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_discarded_steps_leave_no_blocks_behind(in_flight: int) -> None:
    """As after Ctrl-C: blocks that were never computed are not found, and all requests restart."""
    fake_model = FakeModel(num_blocks=200, tokens=24, in_flight=in_flight, groups=HYBRID)
    submitted = [sampling(name, [*range(40), ord(name) % 50], max_tokens=8, n=2) for name in "abc"]
    for request in submitted:
        fake_model.add(request)
    for _ in range(9):
        fake_model.launch()
        fake_model.discard_in_flight()
        fake_model.step()
    fake_model.drain()
    for request in submitted:
        assert fake_model.result(request.id) == expected(request)


def test_states_are_private_and_never_found_again() -> None:
    fake_model = FakeModel(num_blocks=60, groups=STATES, in_flight=2)
    request = sampling("r", list(range(20)), max_tokens=6, n=3)
    fake_model.add(request)
    fake_model.drain()
    assert fake_model.result("r") == expected(request)
    assert sum(len(batch.copies) for batch in fake_model.batches) == 2 * 2  # two forks, two blocks each
    fake_model.add(sampling("again", list(range(20)), max_tokens=2))
    fake_model.drain()
    assert fake_model.batches[-2].sequences[0].start == 16  # the prompt's second chunk: none of it was cached


def test_drafts_save_steps_without_changing_outputs() -> None:
    request = sampling("r", [1, 2, 3, 4], max_tokens=60)
    oracle = Oracle(random.Random(0))
    oracle.expect(request)
    fake_model = FakeModel(num_blocks=200, groups=HYBRID, proposer=oracle)
    fake_model.add(request)
    fake_model.drain()
    assert fake_model.result("r") == expected(request)
    assert len(fake_model.batches) < 50


@st.composite
def workloads(draw: Callable) -> tuple[list[EngineRequest], dict[str, object]]:
    suffix = st.lists(st.integers(0, 3), min_size=1, max_size=20)
    shared = draw(st.lists(st.integers(0, 3), max_size=24))
    prompt = st.tuples(st.integers(0, 24), suffix).map(lambda drawn: [*shared[: drawn[0]], *drawn[1]])
    submitted: list[EngineRequest] = []
    for index in range(draw(st.integers(1, 8))):
        length, tokens = draw(st.integers(1, 12)), draw(prompt)
        if draw(st.booleans()):
            width = draw(st.integers(1, 3))
            submitted.append(beams(str(index), tokens, width, length))
        else:
            submitted.append(
                sampling(str(index), tokens, length, draw(st.integers(1, 4)), priority=draw(st.integers(0, 2)))
            )
    groups, fewest = draw(st.sampled_from([(FULL, 40), (HYBRID, 90), (STATES, 60), (ONLY_STATES, 30)]))
    num_batches = draw(st.integers(1, 5))
    return submitted, {
        "in_flight": draw(st.integers(1, 3)) if num_batches == 1 else num_batches,
        "num_batches": num_batches,
        "groups": groups,
        "num_blocks": draw(st.integers(fewest, 200)),
        "seqs": draw(st.integers(1, 8)),
        "tokens": draw(st.integers(1, 40)),
        "prefix": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.none() | st.integers(0, 12)),
        "max_itl": draw(st.none() | st.floats(1e-3, 10)),
    }


@settings(max_examples=400, deadline=None)
@given(workloads(), st.booleans(), st.randoms(use_true_random=False))
def test_random_workloads_give_the_expected_outputs_and_balance_the_pool(
    workload: tuple[list[EngineRequest], dict[str, object]], drafts: bool, rng: random.Random
) -> None:
    submitted, options = workload
    oracle = Oracle(rng)
    fake_model = FakeModel(proposer=oracle if drafts else None, **options)  # type: ignore[arg-type]
    fake_model.takes = lambda scheduled: rng.choice([0.0, 1e-6, 1e-3 * scheduled.step.num_tokens, 0.1, 100.0])
    spoiled, stopped = set(), set()
    for request in submitted:
        fake_model.add(request)
        if rng.random() < 0.8:
            oracle.expect(request)
        for _ in range(rng.randrange(4)):
            if fake_model.scheduler.has_work:
                fake_model.step()
        if rng.random() < 0.5:
            fake_model.launch()
        chance, victim = rng.random(), rng.choice(submitted).id
        if chance < 0.1 and fake_model.scheduler.finish(victim, FinishReason.ABORT):
            spoiled.add(victim)
        elif chance < 0.2:
            stopped.add(victim)
            fake_model.scheduler.stop(victim, 0)
        elif chance < 0.3:
            fake_model.spoiled.add(victim)
        elif chance < 0.35:
            fake_model.discard_in_flight()
        fake_model.scheduler.check()
    fake_model.drain()
    for request in submitted:
        if request.id not in spoiled | stopped | fake_model.spoiled:
            assert fake_model.result(request.id) == expected(request)
