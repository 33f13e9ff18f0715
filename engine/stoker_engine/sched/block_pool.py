"""The pool of KV-cache blocks, with reference counts.

    null    block 0, never allocated: empty entries of block tables refer to it (`sizing.cache_groups`)
    free    refs = 0, in the free list, least recently used first; its content may be cached
    in use  refs ≥ 1, one for each sequence that has it in its block table

A block leaves the free list by `allocate` (its content is evicted) or by `acquire` (a prefix hit reuses its content).
It returns to the end of the list when its last reference is released.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from stoker_engine.sizing.cache_groups import NULL_BLOCK, usable_blocks


class BlockPool:
    """Allocates the blocks 1 … `num_blocks` - 1.

    Args:
        num_blocks: number of blocks in the KV cache, including the null block.
        on_evict: called with each block that is allocated, because its previous content is evicted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], object] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(b for b in range(num_blocks) if b != NULL_BLOCK)

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Number of blocks that sequences can hold, free or in use."""
        return usable_blocks(self.num_blocks)

    def is_free(self, block: int) -> bool:
        """Whether no sequence refers to `block`."""
        return self._refs[block] == 0

    def is_shared(self, block: int) -> bool:
        """Whether several sequences refer to `block`."""
        return self._refs[block] > 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently used first. The caller ensures that enough are free."""
        assert count <= len(self._free), f"{count} blocks requested, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._on_evict(block)
            self._refs[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a block whose content is reused."""
        assert block != NULL_BLOCK
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; blocks without references become free, in the given order."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that reference counts and free list match `tables`: the block tables of all live sequences, without
        empty entries."""
        refs = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in refs, "the null block has an owner"
        assert all(self._refs[block] == count for block, count in refs.items()), "reference counts are wrong"
        assert sum(self._refs) == refs.total(), "blocks without an owner have references"
        assert len(self._free) == self.num_usable - len(refs), "the free list is too long or too short"
        assert NULL_BLOCK not in self._free and refs.keys().isdisjoint(self._free), "the free list has blocks in use"
