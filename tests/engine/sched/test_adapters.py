"""Adapters that the scheduler keeps in memory and in slots; no request waits forever for its adapter.

`AdapterModel` is a fake model (`fake_model`) whose loads take several steps. It checks that steps use the adapters in
their slots, and that memory holds no more adapters than permitted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from stoker_common.block_hash import NO_KEYS, CacheKeys
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import TokenDelta

from .fake_model import FULL, HYBRID, FakeModel, beams, expected, sampling


class AdapterModel(FakeModel):
    """A fake model with adapters.

    Args:
        load_steps: calls of `step` that a load takes.

    Attributes:
        loaded, evicted: adapters, in order.
        admitted: by request, the number of steps launched before its first one.
        launched: adapters of each launched step.
    """

    def __init__(self, slots: int, resident: int, adapters: int, load_steps: int = 1, **options: object) -> None:
        super().__init__(max_loras=slots, num_resident_adapters=resident, **options)  # type: ignore[arg-type]
        self.num_slots, self.num_resident = slots, resident
        self.load_steps = load_steps
        self.loaded: list[int] = []
        self.evicted: list[int] = []
        self.admitted: dict[str, int] = {}
        self.launched: list[set[int]] = []
        self.in_memory: set[int] = set()
        self._loading: dict[int, int] = {}
        assert self.scheduler.adapters is not None
        self.table = self.scheduler.adapters
        for number in range(adapters):
            self.table.register(AdapterSource(number, f"adapter {number}", ""))
            self._start_loads()
            while self._loading:
                self._advance_loads()
        self.loaded.clear()
        self.evicted.clear()

    def launch(self) -> None:
        while len(self._in_flight) < self._max_in_flight and (scheduled := self.scheduler.schedule()) is not None:
            self.scheduler.check()
            self._start_loads()
            used = {s.request.spec.adapter for s in scheduled.sequences} - {NO_ADAPTER}
            assert len(used) <= self.num_slots and used <= self.in_memory
            assert {number for _, number in scheduled.step.adapters} <= self.in_memory
            for request in scheduled.admitted:
                self.admitted[request.id] = len(self.launched)
            self.launched.append(used)
            self._in_flight.append(scheduled)
        self._start_loads()

    def step(self) -> list[TokenDelta]:
        self._advance_loads()
        self.launch()
        if not self._in_flight:
            assert self._loading or not self.scheduler.has_work
            return []
        return super().step()

    def _start_loads(self) -> None:
        drops, loads = self.table.pop_decisions()
        for number in drops:
            self.in_memory.remove(number)
            self.evicted.append(number)
        for source in loads:
            self._loading[source.number] = self.load_steps
        assert len(self.in_memory) + len(self._loading) <= self.num_resident

    def _advance_loads(self) -> None:
        for number in list(self._loading):
            self._loading[number] -= 1
            if self._loading[number] <= 0:
                del self._loading[number]
                self.in_memory.add(number)
                self.loaded.append(number)
                self.table.loaded(number, LoadedAdapter(f"digest {number}", 4, 100, 0.5))
        self._start_loads()


def keys(adapter: int) -> CacheKeys:
    return NO_KEYS if adapter == NO_ADAPTER else CacheKeys(root_key=f"adapter {adapter}".encode())


def request(name: str, adapter: int, max_tokens: int = 4, **options: object) -> EngineRequest:
    return sampling(name, [1, 2, 3], max_tokens, adapter=adapter, cache_keys=keys(adapter), **options)  # type: ignore[arg-type]


def batches(model: AdapterModel) -> list[str]:
    return ["".join(sorted(share.id[0] for share in batch.sequences)) for batch in model.batches]


def test_a_batch_mixes_adapters_and_the_base() -> None:
    model = AdapterModel(slots=2, resident=2, adapters=2)
    submitted = [request("a", 0), request("b", 1), request("c", NO_ADAPTER), request("d", 0, n=3)]
    for each in submitted:
        model.add(each)
    model.step()
    assert batches(model) == ["abcd"]
    model.drain()
    assert [model.result(each.id) for each in submitted] == [expected(each) for each in submitted]


def test_waiting_for_a_slot_blocks_no_other_request() -> None:
    model = AdapterModel(slots=1, resident=2, adapters=2)
    for each in (request("a", 0, 6), request("b", 1), request("c", NO_ADAPTER, 2), request("d", NO_ADAPTER, 2)):
        model.add(each)
    model.drain()
    assert batches(model) == ["acd", "acd", "a", "a", "a", "a", "b", "b", "b", "b"]


def test_waiting_for_a_load_blocks_no_other_request() -> None:
    model = AdapterModel(slots=2, resident=2, adapters=3, load_steps=3)
    model.add(request("a", 0))  # evicted by the registration of the others
    model.add(request("b", 2, 2))
    model.add(request("c", NO_ADAPTER, 2))
    model.drain()
    assert batches(model)[0] == "bc"
    assert model.loaded == [0] and model.evicted == [1]


def test_nothing_is_scheduled_while_all_wait_for_loads() -> None:
    model = AdapterModel(slots=1, resident=1, adapters=2, load_steps=5)
    model.add(request("a", 0))
    for _ in range(5):
        assert model.scheduler.schedule() is None
        model.step()
    model.drain()
    assert model.result("a") == expected(request("a", 0))


def test_least_recently_used_adapter_is_evicted() -> None:
    model = AdapterModel(slots=2, resident=3, adapters=3)
    for name, adapter in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        model.add(request(name, adapter, 1))
        model.drain()
    assert not model.evicted
    model.table.register(AdapterSource(3, "adapter 3", ""))
    model._start_loads()
    assert model.evicted == [2]


def test_preempted_sequence_releases_its_slot() -> None:
    model = AdapterModel(slots=1, resident=2, adapters=2, num_blocks=8, prefix=False)
    model.add(request("x", NO_ADAPTER, 20))
    model.add(request("a", 0, 20))
    model.drain()
    assert model.scheduler.num_preemptions
    assert model.result("a") == expected(request("a", 0, 20))


def feed(model: AdapterModel, adapter: int, every: int = 2) -> None:
    """Add a request every few steps, so that this adapter's slot never becomes empty by itself."""
    if len(model.launched) % every == 0:
        model.add(request(f"{adapter}-{len(model.outputs)}", adapter, LENGTH))


#: Number of steps of a request of `feed`.
LENGTH = 6


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("resident", [2, 4])
def test_no_adapter_keeps_its_slot_for_ever(resident: int, in_flight: int) -> None:
    model = AdapterModel(slots=2, resident=resident, adapters=3, in_flight=in_flight, num_blocks=400)
    for _ in range(12):
        feed(model, 0)
        feed(model, 1, every=4)
        model.step()
    assert model.launched[-1] == {0, 1}
    model.add(request("waits", 2, 2))
    added = len(model.launched)
    while "waits" not in model.admitted:
        feed(model, 0)
        feed(model, 1, every=4)
        model.step()
        assert len(model.launched) - added <= 2 * LENGTH + in_flight + model.load_steps
    if resident > 2:  # the slot with the fewest running sequences has been handed over, and the other one was not
        assert 0 in model.launched[-1] and 1 not in model.launched[-1]


def test_slot_is_closed_once_its_sequences_are_behind_the_waiting_request() -> None:
    model = AdapterModel(slots=1, resident=2, adapters=2)
    model.add(request("a", 0, 6))
    model.step()
    model.add(request("b", 1, 2))
    model.add(request("c", 0, 9))  # joins the one that was before b
    for _ in range(6):
        model.step()
    model.add(request("d", 0, 2))
    model.drain()
    assert batches(model) == ["a"] + ["ac"] * 5 + ["c"] * 4 + ["b"] * 2 + ["d"] * 2


def test_least_recently_used_slot_is_taken() -> None:
    model = AdapterModel(slots=3, resident=4, adapters=4)
    for adapter in (0, 1, 2, 1, 0):
        model.add(request(f"{adapter}-{len(model.outputs)}", adapter, 1))
        model.drain()
    slots = dict(model._adapter_in)
    model.add(request("new", 3, 1))
    model.drain()
    changed = [slot for slot, adapter in model._adapter_in.items() if slots[slot] != adapter]
    assert [slots[slot] for slot in changed] == [2]


def test_beams_get_their_slot_while_it_is_reserved_for_another_adapter() -> None:
    """Beams wait for each other: if one were kept out, the others would never leave the slot."""
    for seed in range(20):
        rng = random.Random(seed)
        model = AdapterModel(slots=1, resident=1, adapters=2, num_blocks=rng.randrange(14, 30), prefix=False)
        model.add(request("a", 1, 8))
        model.step()
        search = beams("s", [3, 4, 5, 6, 7], 3, 12)
        search = EngineRequest(search.id, search.prompt_token_ids, search.params, 12, adapter=1, cache_keys=keys(1))
        submitted = [request("b", 0, 3), search, request("x", NO_ADAPTER, 16), request("c", 0, 3)]
        rng.shuffle(submitted)
        for each in submitted:
            model.add(each)
        model.drain()
        assert [model.result(each.id) for each in submitted] == [expected(each) for each in submitted]


def random_requests(rng: random.Random, count: int, adapters: int) -> list[EngineRequest]:
    submitted = []
    for index in range(count):
        adapter = rng.choice([NO_ADAPTER, *range(adapters)])
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        length = rng.randrange(1, 10)
        options = {"adapter": adapter, "cache_keys": keys(adapter), "priority": rng.randrange(3)}
        if rng.random() < 0.2:
            search = beams(str(index), prompt, rng.randrange(1, 4), length)
            submitted.append(
                EngineRequest(
                    search.id,
                    prompt,
                    search.params,
                    length,
                    eos_token_ids=search.eos_token_ids,
                    **options,  # type: ignore[arg-type]
                )
            )
        else:
            submitted.append(sampling(str(index), prompt, length, rng.randrange(1, 4), **options))
    return submitted


@pytest.mark.parametrize("seed", range(60))
def test_random_workloads_give_the_expected_outputs_and_end(seed: int) -> None:
    rng = random.Random(seed)
    adapters, slots = rng.randrange(1, 8), rng.randrange(1, 4)
    groups, fewest = rng.choice([(FULL, 40), (HYBRID, 90)])
    num_batches = rng.choice([1, 1, 2, 3])
    model = AdapterModel(
        slots,
        slots + rng.randrange(3),
        adapters,
        load_steps=rng.randrange(1, 5),
        in_flight=rng.randrange(1, 4) if num_batches == 1 else num_batches,
        num_batches=num_batches,
        groups=groups,
        num_blocks=rng.randrange(fewest, 150),
        seqs=rng.randrange(3, 9),
        tokens=rng.randrange(1, 40),
        prefix=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority"]),
    )
    submitted = random_requests(rng, 30, adapters)
    ended = set()
    for each in submitted:
        model.add(each)
        for _ in range(rng.randrange(4)):
            if model.scheduler.has_work:
                model.step()
        if rng.random() < 0.3:
            model.launch()
        chance, victim = rng.random(), rng.choice(submitted).id
        if chance < 0.05 and model.scheduler.finish(victim, FinishReason.ABORT):
            ended.add(victim)
        elif chance < 0.1:
            model.scheduler.stop(victim, 0)
            ended.add(victim)
        elif chance < 0.13:
            model.discard_in_flight()
        model.scheduler.check()
    model.drain()
    for each in submitted:
        if each.id not in ended:
            assert model.result(each.id) == expected(each)


@pytest.mark.parametrize("seed", range(10))
def test_no_request_is_overtaken_for_more_than_a_few_generations(seed: int) -> None:
    """All requests have the same length, and more adapters than slots are always in use."""
    rng = random.Random(seed)
    length, slots, adapters = 8, 3, 12
    model = AdapterModel(slots, slots + rng.randrange(4), adapters, num_blocks=400, seqs=12, tokens=64)
    weights = [2.0 ** -rng.randrange(6) for _ in range(adapters)]
    added: dict[str, int] = {}
    before: dict[str, int] = {}  # number of earlier requests
    while len(added) < 300:
        while len(model.scheduler.requests) < 24:
            name = str(len(added))
            added[name], before[name] = len(model.launched), len(model.scheduler.requests)
            model.add(request(name, rng.choices(range(adapters), weights)[0], length))
        model.step()
    model.drain()
    # At most 24 requests of up to 12 adapters are ahead of a request: one generation for each of three slots.
    waited = [(model.admitted[name] - first) / length for name, first in added.items()]
    assert max(waited) <= adapters / slots + 3


def test_base_requests_are_scheduled_as_without_lora() -> None:
    plain, lora = FakeModel(num_blocks=30, seqs=4), AdapterModel(2, 3, 4, num_blocks=30, seqs=4)
    rng = random.Random(1)
    submitted: Sequence[EngineRequest] = [
        sampling(
            str(index), [rng.randrange(4) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 12), 1 + index % 3
        )
        for index in range(20)
    ]
    for model in (plain, lora):
        for each in submitted:
            model.add(each)
            model.step()
        model.drain()
    assert plain.batches == lora.batches


def test_failed_load_ends_its_requests_and_is_retried_for_later_ones() -> None:
    model = AdapterModel(slots=1, resident=1, adapters=2)
    model.add(request("a", 0))
    assert model.scheduler.schedule() is None
    assert model.table.pop_decisions() == ([1], [AdapterSource(0, "adapter 0", "", "digest 0")])
    model.in_memory.remove(1)
    model.table.failed(0)
    model.scheduler.finish("a", FinishReason.ERROR)
    assert model.table.takes(0) and not model.table.is_loading
    stats = model.table.stats()
    assert (stats.loads, stats.evictions, stats.failures) == (2, 2, 1) and stats.load_seconds == (0.5, 0.5)
    assert model.table.stats().load_seconds == ()
    model.add(request("b", 0))
    model.drain()
    assert model.result("b") == expected(request("b", 0))


def test_removed_adapter_serves_its_requests_and_is_dropped() -> None:
    model = AdapterModel(slots=1, resident=2, adapters=2)
    model.add(request("a", 0, 6))
    model.add(request("b", 1, 3))
    model.step()

    def is_used(number: int) -> bool:
        return any(each.spec.adapter == number for each in model.scheduler.requests.values())

    for number in (0, 1):
        model.table.remove(number)
        assert not model.table.takes(number)
        model.table.drop_removed(is_used)
        assert model.table.has(number)
    model.drain()
    assert model.result("a") == expected(request("a", 0, 6)) and model.result("b") == expected(request("b", 1, 3))
    model.table.drop_removed(is_used)
    model._start_loads()
    assert not model.in_memory and not model.table.has(0) and not model.table.has(1)
    assert model.table.stats().evictions == 0
    model.table.check([])


def test_adapter_is_checked_while_all_memory_is_in_use() -> None:
    """The new adapter is loaded, and dropped at once."""
    model = AdapterModel(slots=1, resident=1, adapters=1)
    model.add(request("a", 0, 6))
    model.step()
    model.table.register(AdapterSource(1, "adapter 1", ""))
    assert model.table.pop_decisions() == ([], [AdapterSource(1, "adapter 1", "")])
    model.table.check(model.scheduler.running)
    model.table.loaded(1, LoadedAdapter("d", 1, 1, 0.1))
    assert model.table.pop_decisions() == ([1], [])
    model.table.check(model.scheduler.running)
    model.drain()
    model.add(request("b", 1))
    model.drain()
    assert model.result("b") == expected(request("b", 1))


def test_stats_name_running_and_waiting_adapters() -> None:
    model = AdapterModel(slots=1, resident=2, adapters=2)
    for each in (request("a", 1), request("b", 0), request("c", NO_ADAPTER)):
        model.add(each)
    model.step()
    stats = model.scheduler.stats().adapters
    assert stats is not None
    assert (stats.running, stats.waiting) == (("adapter 1",), ("adapter 0",))
    assert FakeModel().scheduler.stats().adapters is None
