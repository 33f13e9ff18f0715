"""Allocates the KV-cache blocks of sequences, shares blocks of equal content, and frees blocks outside sliding windows.

A sequence has a block table for each group of layers (`sizing.cache_groups`). In a group with a sliding window, blocks
that have left the window are released while the sequence still runs; the null block replaces them in the table. In a
group of states the number of blocks is fixed, and every step overwrites all of them.

    full     │ 4 │ 9 │ 2 │ 7 │ 5 ·│          · partly filled
    window   │ 0 │ 0 │ 8 │ 3 │ 6 ·│          0 the null block: released
    state    │ 1 │ 12 │
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker_common.block_hash import BlockHash, extend_chain
from stoker_engine.core import request
from stoker_engine.core.request import NO_ROW
from stoker_engine.sched.block_pool import BlockPool
from stoker_engine.sched.prefix_cache import PrefixCache
from stoker_engine.sizing.cache_groups import NULL_BLOCK, CacheGroup, blocks_per_sequence


@dataclass(frozen=True)
class _Refusal:
    """Why a waiting sequence was not admitted. Its prefix is not looked up again while the reason holds.

    `needed` does not count blocks of its prefix that other sequences hold. More such blocks can only come from an
    admission, which takes over cached blocks, or from new blocks published under one of `hashes`. Both drop the
    refusal.

    Attributes:
        needed: number of blocks that must be free.
        hashes: hashes of the sequence's full blocks.
    """

    sequence: request.Sequence
    num_tokens: int
    needed: int
    hashes: frozenset[BlockHash]

    def still(self, sequence: request.Sequence, num_free: int) -> bool:
        """Whether `sequence` would certainly be refused again."""
        same = self.sequence is sequence and self.num_tokens == len(sequence.token_ids)
        return same and num_free < self.needed


class KVManager:
    """Owner of the block pool, the prefix cache and all sequences' block tables.

    Args:
        num_blocks: number of blocks in the KV cache, including the null block.
        block_size: tokens per block.
        groups: the model's groups of layers.
        step_tokens: maximum number of tokens that one step computes.
        enable_prefix_caching: whether full blocks are cached and shared. Ignored if a layer keeps a state, because
            the state after a prefix is not stored.

    Attributes:
        has_states: whether a layer keeps a state. Computed tokens cannot be removed from a state.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[CacheGroup],
        step_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.windows = [group.sliding_window for group in groups]
        self.has_states = any(group.kind == "state" for group in groups)
        self.enable_prefix_caching = enable_prefix_caching and not self.has_states
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.forget)
        self.queries = 0  # prompt tokens of admitted requests
        self.hits = 0  # those of them found in the cache
        self._groups = groups
        self._has_windows = any(window is not None for window in self.windows)
        self._step_tokens = step_tokens
        self._hashes: dict[request.Sequence, list[BlockHash]] = {}
        self._copies: list[tuple[int, int]] = []
        self._table_changes: list[tuple[int, int, int, int]] = []
        self._refused: _Refusal | None = None

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that sequences hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def admit(self, sequence: request.Sequence) -> bool:
        """Give `sequence` the cached blocks of its prefix, if enough blocks are free for all its known tokens; else
        return False.

        At least the last known token is left to compute, since its logits are needed. The other blocks must be free,
        but are not reserved: admitting a sequence that would soon be preempted wastes work.
        """
        assert not sequence.blocks and sequence.num_launched == 0
        if self._refused is not None and self._refused.still(sequence, self.pool.num_free):
            return False
        tables = self._match(sequence)
        matched = [block for table in tables for block in table if block != NULL_BLOCK]
        num_matched = len(tables[0]) * self.block_size
        needed = blocks_per_sequence(self._groups, len(sequence.token_ids), self._step_tokens, self.block_size)
        needed -= sum(not self.pool.is_free(block) for block in matched)
        if needed > self.pool.num_free:
            hashes = frozenset(self._hashes.get(sequence, ()))
            self._refused = _Refusal(sequence, len(sequence.token_ids), needed, hashes)
            return False
        self._refused = None
        for block in matched:
            self.pool.acquire(block)
        sequence.blocks = tables
        sequence.num_computed = sequence.num_launched = num_matched
        sequence.num_published = num_matched // self.block_size
        return True

    def count_lookup(self, sequence: request.Sequence) -> None:
        """Add an admission to `queries` and `hits`. Called once per request, after the admission is final."""
        if self.enable_prefix_caching:
            self.queries += len(sequence.token_ids)
            self.hits += sequence.num_computed

    def allocate(self, sequence: request.Sequence, num_tokens: int, step: int) -> bool:
        """Extend the block tables for the next `num_tokens` tokens, which `step` computes. False: too few free blocks.

        A shared block that the new tokens are written into is copied first (`pop_copies`).
        """
        if self._has_windows:
            self._release_passed(sequence)
        start = sequence.num_launched
        end = start + num_tokens
        written, within = divmod(start, self.block_size)
        if 0 < within <= self.block_size - num_tokens and not self.has_states:
            # The common case: the tokens fit into the partly filled blocks, and no other sequence shares these.
            is_shared = self.pool.is_shared
            for table in sequence.blocks:
                if is_shared(table[written]):
                    break
            else:
                if end // self.block_size > sequence.num_published and self.enable_prefix_caching:
                    self._publish(sequence, min(end, len(sequence.token_ids)), step)
                return True
        missing, shared = 0, 0
        for table, group in zip(sequence.blocks, self._groups, strict=True):
            missing += max(self._table_length(group, end) - len(table), 0)
            if group.kind == "state":
                shared += self._is_shared(table) * len(table)
            elif within:
                shared += self.pool.is_shared(table[written])
        if missing or shared:
            if missing + shared > self.pool.num_free:
                return False
            self._extend(sequence, end)
        if end // self.block_size > sequence.num_published and self.enable_prefix_caching:
            # Only known tokens: the content of blocks with sampled or drafted tokens in flight is not certain.
            self._publish(sequence, min(end, len(sequence.token_ids)), step)
        return True

    def computed(self, sequence: request.Sequence) -> None:
        """Publish the sequence's full blocks whose tokens are known and computed."""
        if self.enable_prefix_caching and sequence.num_computed // self.block_size > sequence.num_published:
            self._publish(sequence, min(sequence.num_computed, len(sequence.token_ids)), None)

    def trim(self, sequence: request.Sequence) -> None:
        """Release the blocks of rejected draft tokens."""
        for group, table in enumerate(sequence.blocks):
            needed = self._table_length(self._groups[group], sequence.num_known)
            self._table_changes += [(group, sequence.row, index, NULL_BLOCK) for index in range(needed, len(table))]
            self.pool.release(reversed(table[needed:]))
            del table[needed:]

    def fork(self, parent: request.Sequence, child: request.Sequence) -> None:
        """Let `child`, which has the same known tokens, share the blocks of all computed tokens of `parent`."""
        assert not child.blocks and child.num_launched == 0
        lengths = [self._table_length(group, parent.num_computed) for group in self._groups]
        child.blocks = [table[:held] for table, held in zip(parent.blocks, lengths, strict=True)]
        child.num_computed = child.num_launched = parent.num_computed
        child.num_published = parent.num_computed // self.block_size
        for table in child.blocks:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.acquire(block)
        if parent in self._hashes:
            self._hashes[child] = self._hashes[parent][: child.num_published]

    def forget(self, sequence: request.Sequence) -> set[int]:
        """Remove the sequence's blocks from the prefix cache, because their content is corrupted.

        Returns:
            The blocks that a step in flight computes; sequences that share them are corrupted too.
        """
        held = {block for table in sequence.blocks for block in table if block != NULL_BLOCK}
        return {block for block in held if self.prefix_cache.forget(block)}

    def pop_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) pairs of blocks to copy before the next step."""
        copies, self._copies = self._copies, []
        return copies

    def pop_table_changes(self) -> array[int]:
        """Return the changed entries of block tables since the last call, in the format of `core.step.Step.tables`."""
        changes, self._table_changes = self._table_changes, []
        return array("i", itertools.chain.from_iterable(changes))

    def free(self, sequence: request.Sequence) -> None:
        """Release a sequence's blocks, the last first, so that prefixes stay cached longer than their continuations.

        Blocks that a step in flight still writes are released too: steps run in order, so a new owner writes later.
        """
        for table in sequence.blocks:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        if self._table_changes and sequence.row != NO_ROW:
            self._table_changes = [change for change in self._table_changes if change[1] != sequence.row]
        sequence.blocks = []
        sequence.num_computed = sequence.num_launched = sequence.num_published = 0
        self._hashes.pop(sequence, None)

    def check(self, sequences: Iterable[request.Sequence]) -> None:
        """Assert that the pool, the cache and the block tables of all live `sequences` are consistent."""
        live = list(sequences)
        self.pool.check([block for block in table if block != NULL_BLOCK] for s in live for table in s.blocks)
        self.prefix_cache.check()
        for sequence in live:
            for table, group in zip(sequence.blocks, self._groups, strict=False):
                assert self._table_length(group, sequence.num_launched) <= len(table)
                assert len(table) <= self._table_length(group, sequence.num_known) or sequence.is_blocked
                assert NULL_BLOCK not in table[self._first_visible(sequence.num_computed, group.sliding_window) :]

    def _first_visible(self, num_computed: int, window: int | None) -> int:
        """Return the index of the oldest block that the token at position `num_computed` attends to."""
        return 0 if window is None else max(num_computed - window + 1, 0) // self.block_size

    def _extend(self, sequence: request.Sequence, end: int) -> None:
        """Copy the shared blocks that are about to be written, and add missing ones."""
        written, within = divmod(sequence.num_launched, self.block_size)
        for group_index, (table, group) in enumerate(zip(sequence.blocks, self._groups, strict=True)):
            if group.kind == "state":
                shared_indices = range(len(table)) if self._is_shared(table) else range(0)
            else:
                shared_indices = (
                    range(written, written + 1) if within and self.pool.is_shared(table[written]) else range(0)
                )
            for index in shared_indices:
                [copy] = self.pool.allocate(1)
                self._copies.append((table[index], copy))
                self.pool.release([table[index]])
                table[index] = copy
                self._table_changes.append((group_index, sequence.row, index, copy))
            first = len(table)
            added = self.pool.allocate(max(self._table_length(group, end) - first, 0))
            self._table_changes += [(group_index, sequence.row, first + i, block) for i, block in enumerate(added)]
            table += added

    def _is_shared(self, table: list[int]) -> bool:
        return any(map(self.pool.is_shared, table))

    def _table_length(self, group: CacheGroup, num_tokens: int) -> int:
        """Return the number of entries in a sequence's table for `num_tokens` tokens; for states it is fixed."""
        return group.blocks_per_sequence if group.kind == "state" else -(-num_tokens // self.block_size)

    def _release_passed(self, sequence: request.Sequence) -> None:
        # Not `num_launched`: tokens in flight may be rejected or forked, so blocks before their windows are kept.
        for group, (table, window) in enumerate(zip(sequence.blocks, self.windows, strict=True)):
            index = self._first_visible(sequence.num_computed, window) - 1
            passed = []
            while index >= 0 and table[index] != NULL_BLOCK:
                passed.append(table[index])
                table[index] = NULL_BLOCK
                self._table_changes.append((group, sequence.row, index, NULL_BLOCK))
                index -= 1
            self.pool.release(reversed(passed))

    def _match(self, sequence: request.Sequence) -> list[list[int]]:
        """Return the block tables of the longest cached prefix. In a group with a window, only the blocks that the
        token after the prefix attends to must be cached. The tables are empty if the cache is not used."""
        if not self.enable_prefix_caching or sequence.request.wants_prompt_logprobs:
            return [[] for _ in self.windows]
        length = (len(sequence.token_ids) - 1) // self.block_size
        chain = self._chain(sequence, len(sequence.token_ids) - 1)
        full = [group for group, window in enumerate(self.windows) if window is None]
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        found: list[list[int]] = [[] for _ in self.windows]
        for group in full:
            for hash_ in chain[:length]:
                block = self.prefix_cache.find(group, hash_)
                if block is None:
                    break
                found[group].append(block)
            length = len(found[group])
        # Search backwards from the end, as far as a window reaches. A missing block that is visible from one end is
        # visible from all ends between, too, so the prefix can only end before it, and no block is looked up twice.
        first_visible, index = self._all_first_visible(length), length
        while index > min((first_visible[group] for group in windowed), default=length):
            index -= 1
            for group in windowed:
                if index < first_visible[group]:
                    continue
                block = self.prefix_cache.find(group, chain[index])
                if block is None:
                    length, first_visible = index, self._all_first_visible(index)
                    for group_index in windowed:
                        found[group_index].clear()
                    break
                found[group].append(block)
        for group in full:
            del found[group][length:]
        for group in windowed:
            found[group] = [NULL_BLOCK] * first_visible[group] + found[group][::-1]
        return found

    def _all_first_visible(self, num_blocks: int) -> list[int]:
        """Return for each group the index of the oldest block that the token after `num_blocks` full blocks attends
        to."""
        return [self._first_visible(num_blocks * self.block_size, window) for window in self.windows]

    def _publish(self, sequence: request.Sequence, num_tokens: int, step: int | None) -> None:
        """Publish the full blocks within the first `num_tokens` tokens; they are pending until `step` has run (None:
        already computed)."""
        chain = self._chain(sequence, num_tokens)
        for index in range(sequence.num_published, num_tokens // self.block_size):
            if self._refused is not None and chain[index] in self._refused.hashes:
                self._refused = None
            for group, table in enumerate(sequence.blocks):
                if table[index] != NULL_BLOCK:
                    self.prefix_cache.insert(group, chain[index], table[index], step, sequence)
            sequence.num_published = index + 1

    def _chain(self, sequence: request.Sequence, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the sequence's full blocks: all within the first `num_tokens` tokens, and possibly later
        ones."""
        chain = self._hashes.setdefault(sequence, [])
        num_blocks = num_tokens // self.block_size
        if len(chain) < num_blocks:
            keys = sequence.request.spec.cache_keys
            extend_chain(chain, sequence.token_ids, self.block_size, num_blocks, keys)
        return chain
