"""The engine for each request, compared with the rule recomputed from the whole history."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stoker_common.block_hash import NO_KEYS, CacheKeys, ContentSpan
from stoker_engine.core.step_report import SchedulerStats
from stoker_engine.processes.dp_router import CHUNK_TOKENS, SEQUENCE_TOKENS, DPRouter

MANY = 10_000


def _prompt(*parts: tuple[str, int]) -> list[int]:
    """Return the concatenation of parts with these lengths; parts of the same name are equal."""
    return [random.Random(f"{name}/{i}").randrange(150_000) for name, length in parts for i in range(length)]


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_requests_go_to_the_engine_with_the_least_work(seed: int, block_size: int) -> None:
    """Prompts share prefixes of all lengths, engines die and report, and requests end in any order."""
    chance = random.Random(seed)
    num_engines = chance.randint(2, 5)
    router = DPRouter(num_engines, block_size, MANY, MANY)
    chunk = router.chunk_tokens
    assert chunk % block_size == 0 and chunk >= block_size
    routed: list[list[tuple[str, list[int]]]] = [[] for _ in range(num_engines)]
    running: dict[str, tuple[int, int, int]] = {}  # engine, sequences, waiting prompt tokens
    for number in range(300):
        among = sorted(chance.sample(range(num_engines), chance.randint(1, num_engines)))
        name, salt, sequences = str(number), chance.choice(["", "", "salt"]), chance.choice([1, 1, 4])
        prompt = _prompt(
            (f"system{chance.randrange(2)}", chance.choice([0, 1, chunk - 1, chunk, 3 * chunk])),
            (f"user{chance.randrange(6)}", chance.choice([1, chunk, chunk + 1, 5 * chunk + 3])),
        )

        def computed(engine: int, prompt: list[int] = prompt, salt: str = salt) -> int:
            longest_prefix = 0
            for its_salt, earlier in routed[engine]:
                same = next((i for i, (a, b) in enumerate(zip(prompt, earlier, strict=False)) if a != b), None)
                same = min(len(prompt), len(earlier)) if same is None else same
                whole = min(same, len(prompt) - 1, len(earlier) - 1) // chunk * chunk
                longest_prefix = max(longest_prefix, whole if its_salt == salt else 0)
            return len(prompt) - longest_prefix

        def work(engine: int, running: dict[str, tuple[int, int, int]] = running) -> int:
            in_flight = [each for each in running.values() if each[0] == engine]
            return computed(engine) + sum(waiting + SEQUENCE_TOKENS * sequences for _, sequences, waiting in in_flight)

        before = {engine: work(engine) for engine in among}
        needs = {engine: computed(engine) for engine in among}
        engine = router.begin(name, prompt, sequences, CacheKeys(salt), among=among)
        assert engine in among and before[engine] == min(before.values())
        running[name] = engine, sequences, needs[engine]
        routed[engine].append((salt, prompt))
        for each in chance.sample(sorted(running), min(len(running), chance.randint(0, 2))):
            router.mark_started(each)
            running[each] = (*running[each][:2], 0)
        for each in chance.sample(sorted(running), min(len(running), chance.randint(0, 2))):
            router.end(each)
            del running[each]
        if chance.random() < 0.02:
            dead = chance.randrange(num_engines)
            router.forget(dead)
            routed[dead].clear()
            running = {name: in_flight for name, in_flight in running.items() if in_flight[0] != dead}
        for each in range(num_engines):
            in_flight = [(sequences, waiting) for engine, sequences, waiting in running.values() if engine == each]
            assert router.load(each) == (sum(s for s, _ in in_flight), sum(w for _, w in in_flight))
    for name in [*running, "unknown"]:
        router.end(name)
        router.end(name)
        router.mark_started(name)
    assert all(router.load(engine) == (0, 0) for engine in range(num_engines))


def test_conversations_keep_their_engine_and_new_ones_spread() -> None:
    router = DPRouter(4, 16, MANY, 256)
    first = [router.begin(f"first{i}", _prompt((f"chat{i}", 500)), 1, among=range(4)) for i in range(4)]
    assert sorted(first) == [0, 1, 2, 3]
    for round_number in range(2, 6):
        for i in random.Random(round_number).sample(range(4), 4):
            prompt = _prompt((f"chat{i}", 500 * round_number))
            assert router.begin(f"{round_number}/{i}", prompt, 1, among=range(4)) == first[i]


def test_ties_are_spread() -> None:
    router = DPRouter(3, 16, MANY, 256)
    chosen = Counter[int]()
    for number in range(30):
        chosen[router.begin(str(number), [1, 2, 3], 1, among=range(3))] += 1
        router.end(str(number))
    assert set(chosen.values()) == {10}


def test_a_prefix_shared_by_all_spreads_with_the_load() -> None:
    """No engine has much more load than others, although one had the prefix first."""
    router = DPRouter(4, 16, MANY, 256)
    for number in range(200):
        router.begin(str(number), _prompt(("system", 1000), (f"user{number}", 20)), 1, among=range(4))
        router.mark_started(str(number))
    loads = [router.load(engine)[0] for engine in range(4)]
    assert max(loads) - min(loads) <= 1000 // SEQUENCE_TOKENS + 1


def test_engines_without_room_come_last() -> None:
    router = DPRouter(2, 16, MANY, max_num_seqs=4)
    prompt = _prompt(("long", 5000))
    first = router.begin("0", prompt, 4, among=range(2))
    assert router.begin("1", prompt, 1, among=range(2)) != first, "a step has room for no more sequences"
    assert router.begin("2", prompt, 4, among=range(2)) != first, "no engine has room, and the other one has less work"
    router = DPRouter(2, 16, MANY, 256)
    first = router.begin("0", prompt, 1, among=range(2))
    router.mark_started("0")
    router.report(first, SchedulerStats(3, 0, 1.0, 0, 0, 0))
    assert router.begin("1", prompt, 1, among=range(2)) == first, "the cache is full, but no request waits"
    router.report(first, SchedulerStats(3, 2, 0.97, 0, 0, 0))
    assert router.begin("2", prompt, 1, among=range(2)) != first


def test_remembered_prefixes_are_bounded_by_the_cache_size() -> None:
    """The beginning of a prompt is kept longer than its end."""
    router = DPRouter(1, 16, 10 * CHUNK_TOKENS // 16, 256)
    for number in range(50):
        router.begin(str(number), _prompt((f"chat{number}", 8 * CHUNK_TOKENS)), 1, among=[0])
        router.end(str(number))
        assert len(router._engines[0].seen) <= 10
    router.begin("again", _prompt(("chat49", 8 * CHUNK_TOKENS)), 1, among=[0])
    assert router.load(0)[1] == CHUNK_TOKENS, "the last chunk is always computed"
    router.end("again")
    router.begin("longer than the cache", _prompt(("book", 100 * CHUNK_TOKENS)), 1, among=[0])
    router.end("longer than the cache")
    router.begin("page", _prompt(("book", 4 * CHUNK_TOKENS)), 1, among=[0])
    assert router.load(0)[1] == CHUNK_TOKENS


def test_keys_keep_prefixes_apart() -> None:
    """A prompt goes to the engine that computed its prefix under the same keys."""
    router = DPRouter(3, 16, 10_000, 64)
    prompt = _prompt(("chat", 4 * CHUNK_TOKENS))
    keys = [NO_KEYS, CacheKeys(root_key=b"adapter"), CacheKeys(spans=(ContentSpan(0, 8, b"image"),))]
    engines = [router.begin(str(n), prompt, 1, each, among=range(3)) for n, each in enumerate(keys)]
    assert sorted(engines) == [0, 1, 2]
    for number in range(3):
        router.end(str(number))
    for number, (each, engine) in enumerate(zip(keys, engines, strict=True)):
        assert router.begin(f"again {number}", prompt, 1, each, among=range(3)) == engine
        router.end(f"again {number}")
