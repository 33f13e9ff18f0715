"""The scheduler against a pretend model, under workloads that hypothesis thinks of. Nothing else is faked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_engine.core.request import FinishReason, Request
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduler import Scheduler

BLOCK = 4


def _scheduler(num_blocks: int = 32, seqs: int = 8, tokens: int = 16, prefix: bool = True) -> Scheduler:
    return Scheduler(KVManager(num_blocks, BLOCK, prefix), seqs, tokens)


def _request(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens)


def _step(scheduler: Scheduler) -> list[Request]:
    """One step in which the pretend model answers every sequence with its length so far."""
    batch = scheduler.schedule()
    assert 0 < batch.num_tokens <= scheduler.max_num_batched_tokens
    assert len(batch.sequences) <= scheduler.max_num_seqs
    for sequence in batch.sequences:
        assert sequence.token_ids
        assert len(sequence.blocks) * BLOCK >= sequence.end
    advanced = scheduler.commit(batch, [sequence.end for sequence in batch.sampling])
    scheduler.check()
    return advanced


def _drain(scheduler: Scheduler, limit: int = 5000) -> None:
    for _ in range(limit):
        if not scheduler.has_work:
            return
        _step(scheduler)
    raise AssertionError("the scheduler makes no progress")


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    scheduler = _scheduler(tokens=8)
    scheduler.add(_request("short", [1, 2], max_tokens=20))
    _step(scheduler)
    scheduler.add(_request("long", list(range(30))))
    shares = []
    for _ in range(5):
        batch = scheduler.schedule()
        shares.append({sequence.request_id: len(sequence.token_ids) for sequence in batch.sequences})
        scheduler.commit(batch, [1] * len(batch.sampling))
    assert shares[:4] == [{"short": 1, "long": 7}] * 4
    assert shares[4] == {"short": 1, "long": 2}


def test_the_last_to_arrive_is_preempted_and_finishes_all_the_same() -> None:
    scheduler = _scheduler(num_blocks=8, prefix=False)
    first, last = _request("first", [1] * 8, 16), _request("last", [2] * 8, 16)
    scheduler.add(first)
    scheduler.add(last)
    _drain(scheduler)
    assert (first.num_preemptions, last.num_preemptions > 0) == (0, True)
    assert last.token_ids == [2] * 8 + list(range(8, 24))


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = _scheduler(tokens=64)
    for name in "abc":
        scheduler.add(_request(name, [7] * 12 + [ord(name)]))
    batch = scheduler.schedule()
    assert [len(sequence.token_ids) for sequence in batch.sequences] == [13, 1, 1]
    assert len({tuple(sequence.blocks[:3]) for sequence in batch.sequences}) == 1


def test_a_preempted_request_finds_its_own_prefix_again() -> None:
    scheduler = _scheduler()
    request = _request("a", list(range(13)))
    scheduler.add(request)
    _step(scheduler)
    scheduler.running.remove(request)
    scheduler.kv.free(request)
    request.num_preemptions = 1
    scheduler.waiting.put_back(request)
    assert scheduler.schedule().sequences[0].start == 12


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(8, 24),
    seqs=st.integers(1, 6),
    tokens=st.integers(1, 20),
    prefix=st.booleans(),
    work=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 10), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
)
def test_every_request_ends_and_the_pool_balances(
    num_blocks: int, seqs: int, tokens: int, prefix: bool, work: list[tuple[list[int], int, int]]
) -> None:
    scheduler = _scheduler(num_blocks, seqs, tokens, prefix)
    requests = []
    for index, (prompt, max_tokens, abort_at) in enumerate(work):
        request = _request(str(index), prompt, max_tokens)
        requests.append(request)
        scheduler.add(request)
        if abort_at > 20:  # some leave again, at some later time
            for _ in range(abort_at - 20):
                if scheduler.has_work:
                    _step(scheduler)
            scheduler.finish(request.id, FinishReason.ABORT)
            scheduler.check()
    _drain(scheduler)
    assert scheduler.kv.pool.num_free == num_blocks
    for request, (prompt, max_tokens, _) in zip(requests, work, strict=True):
        assert request.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        if request.finish_reason is FinishReason.LENGTH:
            assert request.token_ids == prompt + list(range(len(prompt), len(prompt) + max_tokens))
