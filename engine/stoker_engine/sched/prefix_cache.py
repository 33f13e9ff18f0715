"""Which block holds which prefix: a two-way map between keys and blocks.

A key is a group of layers and a block hash, which names the block's tokens and everything before them.
"""

from __future__ import annotations

from stoker_engine.contract.block_hash import BlockHash

Key = tuple[int, BlockHash]


class PrefixCache:
    """Remembers full blocks by group and hash."""

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def find(self, group: int, block_hash: BlockHash) -> int | None:
        """The block that holds it, if one does."""
        return self._block_of.get((group, block_hash))

    def insert(self, group: int, block_hash: BlockHash, block: int) -> None:
        """Notes what `block` holds. What is already held elsewhere keeps its first block."""
        key = (group, block_hash)
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def check(self) -> None:
        """Asserts that the two maps mirror each other."""
        assert self._key_of == {block: key for key, block in self._block_of.items()}
