"""Which block holds which prefix: a two-way map between keys and blocks.

A key is a group of layers and a block hash, which names the block's tokens and everything before them.

    pending    a step in flight computes it. It may be shared already: steps run in order, and within a step each layer
               writes all keys before it attends. If what computes it turns out to be wrong, it is forgotten, and
               whoever shares it has to start again.
    computed   its content is there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from stoker_common.block_hash import BlockHash

Key = tuple[int, BlockHash]


class PrefixCache:
    """Remembers full blocks by group and hash."""

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._pending: dict[int, tuple[int, object]] = {}  # block → the step that computes it, and for whom
        self._of_step: defaultdict[int, list[int]] = defaultdict(list)

    def find(self, group: int, block_hash: BlockHash) -> int | None:
        """The block that holds it, or will, if one does."""
        return self._block_of.get((group, block_hash))

    def insert(
        self, group: int, block_hash: BlockHash, block: int, step: int | None = None, owner: object = None
    ) -> None:
        """Notes what `block` holds. What is already held elsewhere keeps its first block.

        Args:
            step: the one in flight that computes it; None: it is computed.
            owner: for whom.
        """
        key = (group, block_hash)
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if step is not None:
                self._pending[block] = step, owner
                self._of_step[step].append(block)

    def computed(self, step: int) -> None:
        """`step` has run: what it computes is computed."""
        for block in self._of_step.pop(step, ()):
            if self._pending.get(block, (None, None))[0] == step:
                del self._pending[block]

    def forget(self, block: int) -> bool:
        """The block's content is about to be overwritten, or not to be trusted. Returns whether it was pending."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        return self._pending.pop(block, None) is not None

    def forget_pending(self, of: Callable[[object], bool] = lambda owner: True) -> set[int]:
        """Forgets pending blocks whose owners are such, and returns them."""
        forgotten = {block for block, (_, owner) in self._pending.items() if of(owner)}
        for block in forgotten:
            self.forget(block)
        return forgotten

    def check(self) -> None:
        """Asserts that the two maps mirror each other."""
        assert self._key_of == {block: key for key, block in self._block_of.items()}
        assert self._pending.keys() <= self._key_of.keys()
        assert all(block in self._of_step[step] for block, (step, _) in self._pending.items())
