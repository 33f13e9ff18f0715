"""The prefix cache: a two-way map between keys and blocks.

A key is a group of layers and a block hash, which identifies the block's tokens and all tokens before them.

    pending    a step in flight computes it. It can be shared already: steps run in order, and within a step each layer
               writes all keys and values before it attends. If the step's result is corrupted, the block is removed,
               and sequences that share it are requeued.
    computed   its content is in the cache
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from stoker_common.block_hash import BlockHash

Key = tuple[int, BlockHash]


class PrefixCache:
    """Maps full blocks to and from their group and hash."""

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._pending: dict[int, tuple[int, object]] = {}  # block → (step that computes it, owner)
        self._of_step: defaultdict[int, list[int]] = defaultdict(list)

    def find(self, group: int, block_hash: BlockHash) -> int | None:
        """Return the block with this content, pending or computed, or None."""
        return self._block_of.get((group, block_hash))

    def insert(
        self, group: int, block_hash: BlockHash, block: int, step: int | None = None, owner: object = None
    ) -> None:
        """Record the content of `block`, unless another block already has this content, or `block` is already recorded.

        Args:
            step: the step in flight that computes it; None: already computed.
            owner: the sequence that the step computes it for.
        """
        key = (group, block_hash)
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if step is not None:
                self._pending[block] = step, owner
                self._of_step[step].append(block)

    def computed(self, step: int) -> None:
        """Mark the blocks that `step` computes as computed."""
        for block in self._of_step.pop(step, ()):
            if self._pending.get(block, (None, None))[0] == step:
                del self._pending[block]

    def forget(self, block: int) -> bool:
        """Remove a block whose content is overwritten or corrupted. Returns whether it was pending."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        return self._pending.pop(block, None) is not None

    def forget_pending(self, of: Callable[[object], bool] = lambda owner: True) -> set[int]:
        """Remove the pending blocks whose owner satisfies `of`, and return them."""
        forgotten = {block for block, (_, owner) in self._pending.items() if of(owner)}
        for block in forgotten:
            self.forget(block)
        return forgotten

    def check(self) -> None:
        """Assert that the two maps are consistent."""
        assert self._key_of == {block: key for key, block in self._block_of.items()}
        assert self._pending.keys() <= self._key_of.keys()
        assert all(block in self._of_step[step] for block, (step, _) in self._pending.items())
