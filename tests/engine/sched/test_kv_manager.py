"""Lookups of the KV manager: none is repeated within a prefix, or for a sequence that keeps waiting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stoker_common.block_hash import BlockHash
from stoker_engine.core.request import Request, Sequence
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sizing.cache_groups import NULL_BLOCK

from .fake_model import BLOCK, HYBRID, FakeModel, sampling


class Lookups(Counter[tuple[int, BlockHash]]):
    """Counts the lookups in a manager's prefix cache."""

    def __init__(self, kv: KVManager, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        find = kv.prefix_cache.find

        def counted(group: int, block_hash: BlockHash) -> int | None:
            self[group, block_hash] += 1
            return find(group, block_hash)

        monkeypatch.setattr(kv.prefix_cache, "find", counted)


def sequence_of(tokens: list[int]) -> Sequence:
    return Request(sampling("r", tokens), (0,)).live[0]


def longest(kv: KVManager, cached: list[set[int]], blocks: int) -> int:
    """Return the longest usable prefix, in blocks, given the cached blocks of each group."""

    def fits(length: int) -> bool:
        firsts = (0 if w is None else max(length * BLOCK - w + 1, 0) // BLOCK for w in kv.windows)
        return all(held.issuperset(range(first, length)) for first, held in zip(firsts, cached, strict=True))

    return max(filter(fits, range(blocks + 1)))


def test_longest_prefix_is_found_without_repeated_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(200):
        blocks = rng.randint(1, 30)
        kv = KVManager(4 * blocks + 10, BLOCK, HYBRID, 16)
        sequence = sequence_of([rng.randrange(50) for _ in range(blocks * BLOCK + 1)])
        chain = kv._chain(sequence, blocks * BLOCK)
        missing = rng.choice([0, 0.05, 0.3])
        cached: list[set[int]] = [set() for _ in HYBRID]
        for group in range(len(HYBRID)):
            for index in range(blocks):
                if rng.random() >= (missing / 5 if group == 0 else missing):
                    cached[group].add(index)
                    kv.prefix_cache.insert(group, chain[index], 1 + group * blocks + index)
        lookups = Lookups(kv, monkeypatch)
        assert kv.admit(sequence)
        assert len(sequence.blocks[0]) == longest(kv, cached, blocks)
        assert all(count == 1 for count in lookups.values())
        for group, (table, window) in enumerate(zip(sequence.blocks, kv.windows, strict=True)):
            first = kv._first_visible(len(table) * BLOCK, window)
            assert table == [NULL_BLOCK if index < first else 1 + group * blocks + index for index in range(len(table))]


def test_prefix_without_window_blocks_costs_two_lookups_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 3000
    kv = KVManager(5 * blocks, BLOCK, HYBRID, 16)
    sequence = sequence_of([index % 50 for index in range(blocks * BLOCK + 1)])
    for index, hash_ in enumerate(kv._chain(sequence, blocks * BLOCK)):
        kv.prefix_cache.insert(0, hash_, 1 + index)
    lookups = Lookups(kv, monkeypatch)
    assert kv.admit(sequence) and sequence.num_computed == 0
    assert lookups.total() <= 2 * blocks


def test_head_of_the_queue_is_looked_up_again_only_when_it_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_model = FakeModel(num_blocks=41, tokens=40)
    runner = sampling("runner", list(range(40)), max_tokens=60)
    fake_model.add(runner)
    fake_model.step()
    fake_model.add(sampling("waits", [7] * 80, max_tokens=2))  # 20 of 30 free blocks, which the runner holds
    fake_model.scheduler.max_num_seqs = 1
    while fake_model.scheduler.kv.pool.num_free >= 20:
        fake_model.step()
    fake_model.scheduler.max_num_seqs = 8
    lookups = Lookups(fake_model.scheduler.kv, monkeypatch)
    fake_model.step()
    first = lookups.total()
    assert first > 0
    for _ in range(10):
        fake_model.step()
    assert lookups.total() == first
    fake_model.drain()
    assert lookups.total() > first and fake_model.result("waits")


def test_prefix_that_comes_into_use_admits_the_head_of_the_queue() -> None:
    """Two requests with the same long prompt fit only together, and the second is first refused."""
    fake_model = FakeModel(num_blocks=31, tokens=16)
    prompt = list(range(50)) + list(range(30))  # 20 blocks
    for name in "ab":
        fake_model.add(sampling(name, prompt, max_tokens=6))
    fake_model.drain()
    assert fake_model.scheduler.num_preemptions == 0
    together = [batch for batch in fake_model.batches if len(batch.sequences) == 2]
    assert together, "the second waited for the first to end"
