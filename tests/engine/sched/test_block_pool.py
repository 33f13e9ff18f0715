"""The block pool: least recently used first, and it balances."""

from __future__ import annotations

import pytest

from stoker_engine.sched.block_pool import BlockPool


def test_blocks_come_back_least_recently_used_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1, 0])
    assert pool.allocate(3) == [3, 1, 0]
    assert evicted == [0, 1, 2, 3, 1, 0]


def test_a_shared_block_is_free_when_its_last_user_lets_go() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.acquire(block)
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    pool.acquire(block)  # its content is still wanted
    pool.check([[block]])


def test_mistakes_are_noticed() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        pool.allocate(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([])
