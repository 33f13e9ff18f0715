"""Which block holds which prefix: a two-way map between block hashes and blocks."""

from __future__ import annotations

from collections.abc import Iterable

from stoker_engine.contract.block_hash import BlockHash


class PrefixCache:
    """Remembers full blocks by the hash of their tokens and of everything before them."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def longest_match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest prefix of the chain `hashes` that is held."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: BlockHash, block: int) -> None:
        """Notes that `block` holds that prefix. A prefix already held elsewhere keeps its first block."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check(self) -> None:
        """Asserts that the two maps mirror each other."""
        assert self._hash_of == {block: block_hash for block_hash, block in self._block_of.items()}
