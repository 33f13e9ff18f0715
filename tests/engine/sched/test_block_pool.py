"""The block pool evicts the least recently used block, never the null block, and stays balanced."""

from __future__ import annotations

import pytest

from stoker_engine.sched.block_pool import BlockPool
from stoker_engine.sizing.cache_groups import NULL_BLOCK


def test_blocks_are_reused_least_recently_used_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    assert pool.num_usable == pool.num_free == 4
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([2, 1])
    assert pool.allocate(3) == [4, 2, 1]
    assert evicted == [1, 2, 3, 4, 2, 1]


def test_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.acquire(block)
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    pool.acquire(block)  # its content is still used
    pool.check([[block]])


def test_misuse_fails_an_assertion() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.release([1])
    with pytest.raises(AssertionError):
        pool.allocate(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError):
        pool.acquire(NULL_BLOCK)
    with pytest.raises(AssertionError):
        pool.check([[1], [NULL_BLOCK]])
