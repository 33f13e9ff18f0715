"""Gives sequences their KV-cache blocks, shares those whose content is the same, and takes back what nobody sees.

A sequence has a block table for each group of layers (`sizing.cache_groups`). In a group with a window, blocks that
the window has left are released while the sequence still runs; the null block takes their place in the table. In a
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
    """Why the first in line was not admitted, so that its prefix is not looked up again in every step that it waits.

    Blocks that other sequences have of its prefix count as there. That they become more is known: sequences take blocks
    over when they are admitted, and publish new ones under the prefix's hashes. In both cases the refusal is dropped.

    Attributes:
        needed: blocks that must be free.
        hashes: of the sequence's full blocks.
    """

    sequence: request.Sequence
    num_tokens: int
    needed: int
    hashes: frozenset[BlockHash]

    def still(self, sequence: request.Sequence, num_free: int) -> bool:
        """Whether `sequence` would be refused again."""
        same = self.sequence is sequence and self.num_tokens == len(sequence.token_ids)
        return same and num_free < self.needed


class KVManager:
    """Owner of the block pool, the prefix cache and every sequence's block tables.

    Args:
        num_blocks: blocks in the KV cache, the null block included.
        block_size: tokens in a block.
        groups: the model's groups of layers.
        step_tokens: most tokens that one step computes.
        enable_prefix_caching: whether full blocks are remembered and shared; never where a layer keeps a state, for
            that of a prefix is not kept.

    Attributes:
        has_states: whether a layer keeps a state, which nothing computed can be taken out of again.
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
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of them, found
        self._groups = groups
        self._has_windows = any(window is not None for window in self.windows)
        self._step_tokens = step_tokens
        self._hashes: dict[request.Sequence, list[BlockHash]] = {}
        self._copies: list[tuple[int, int]] = []
        self._table_changes: list[tuple[int, int, int, int]] = []
        self._refused: _Refusal | None = None

    @property
    def usage(self) -> float:
        """Share of the blocks that live sequences hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def admit(self, sequence: request.Sequence) -> bool:
        """Takes over cached blocks of the sequence's prefix, if there is room for all its known tokens.

        At least the last known token is left to compute, since its logits are needed. Room for the whole
        sequence is asked here, not reserved: admitting what would soon be preempted wastes work.
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
        """Counts an admission in `queries` and `hits`: once a request, and not while it is given back."""
        if self.enable_prefix_caching:
            self.queries += len(sequence.token_ids)
            self.hits += sequence.num_computed

    def allocate(self, sequence: request.Sequence, num_tokens: int, step: int) -> bool:
        """Extends the block tables to hold `num_tokens` more tokens, which `step` computes. False: not enough free
        blocks.

        A block that the new tokens are written into and that others share is copied first (`pop_copies`).
        """
        if self._has_windows:
            self._release_passed(sequence)
        start = sequence.num_launched
        end = start + num_tokens
        written, within = divmod(start, self.block_size)
        if 0 < within <= self.block_size - num_tokens and not self.has_states:
            # Nearly always: the tokens go into blocks that it has to itself.
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
            # Of blocks with tokens that are not known yet, or not certain, nobody can say what they will hold.
            self._publish(sequence, min(end, len(sequence.token_ids)), step)
        return True

    def computed(self, sequence: request.Sequence) -> None:
        """Publishes what became known of the sequence: blocks that are full, and computed."""
        if self.enable_prefix_caching and sequence.num_computed // self.block_size > sequence.num_published:
            self._publish(sequence, min(sequence.num_computed, len(sequence.token_ids)), None)

    def trim(self, sequence: request.Sequence) -> None:
        """Gives back blocks that were for tokens which did not come."""
        for group, table in enumerate(sequence.blocks):
            needed = self._table_length(self._groups[group], sequence.num_known)
            self._table_changes += [(group, sequence.row, index, NULL_BLOCK) for index in range(needed, len(table))]
            self.pool.release(reversed(table[needed:]))
            del table[needed:]

    def fork(self, parent: request.Sequence, child: request.Sequence) -> None:
        """Lets `child`, which knows the same tokens, share all that `parent` has computed."""
        assert not child.blocks and child.num_launched == 0
        lengths = [self._table_length(group, parent.num_computed) for group in self._groups]
        child.blocks = [table[:held] for table, held in zip(parent.blocks, lengths, strict=True)]  # it may be ahead
        child.num_computed = child.num_launched = parent.num_computed
        child.num_published = parent.num_computed // self.block_size
        for table in child.blocks:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.acquire(block)
        if parent in self._hashes:
            self._hashes[child] = self._hashes[parent][: child.num_published]

    def forget(self, sequence: request.Sequence) -> set[int]:
        """Takes the sequence's blocks out of the prefix cache: what they hold is not to be trusted.

        Returns:
            Those that a step in flight computes; what shares them is not to be trusted either.
        """
        held = {block for table in sequence.blocks for block in table if block != NULL_BLOCK}
        return {block for block in held if self.prefix_cache.forget(block)}

    def pop_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the next step runs, as (from, to)."""
        copies, self._copies = self._copies, []
        return copies

    def pop_table_changes(self) -> array[int]:
        """Entries of block tables that changed since the last call, as `core.step.Step.tables` has them."""
        changes, self._table_changes = self._table_changes, []
        return array("i", itertools.chain.from_iterable(changes))

    def free(self, sequence: request.Sequence) -> None:
        """Returns all blocks; the last ones first, so that prefixes outlive their continuations.

        Also those that a step in flight still writes: steps run in order, and whoever gets a block writes later.
        """
        for table in sequence.blocks:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        if self._table_changes and sequence.row != NO_ROW:
            self._table_changes = [change for change in self._table_changes if change[1] != sequence.row]
        sequence.blocks = []
        sequence.num_computed = sequence.num_launched = sequence.num_published = 0
        self._hashes.pop(sequence, None)

    def check(self, sequences: Iterable[request.Sequence]) -> None:
        """Asserts that pool, cache and the block tables of all live `sequences` balance."""
        live = list(sequences)
        self.pool.check([block for block in table if block != NULL_BLOCK] for s in live for table in s.blocks)
        self.prefix_cache.check()
        for sequence in live:
            for table, group in zip(sequence.blocks, self._groups, strict=False):
                assert self._table_length(group, sequence.num_launched) <= len(table)
                assert len(table) <= self._table_length(group, sequence.num_known) or sequence.is_blocked
                assert NULL_BLOCK not in table[self._first_visible(sequence.num_computed, group.sliding_window) :]

    def _first_visible(self, num_computed: int, window: int | None) -> int:
        """Index of the oldest block that the token after `num_computed` others still sees."""
        return 0 if window is None else max(num_computed - window + 1, 0) // self.block_size

    def _extend(self, sequence: request.Sequence, end: int) -> None:
        """Copies the blocks that are about to be written and that others share, and adds those that are missing."""
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
        """Entries of a sequence's table once it has computed `num_tokens`."""
        return group.blocks_per_sequence if group.kind == "state" else -(-num_tokens // self.block_size)

    def _release_passed(self, sequence: request.Sequence) -> None:
        # What is in flight may still turn out to be wrong, or fork: only what is computed has passed.
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
        """Block tables of the longest cached prefix; in a group with a window, only what is seen must be there."""
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
        # From the end backwards, as far as a window reaches. Where a block is missing that is seen from the end, it is
        # seen from all ends after it as well: the prefix can only end before it, and no block is looked up twice.
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
        """By group: index of the oldest block that the token after `num_blocks` full blocks still sees."""
        return [self._first_visible(num_blocks * self.block_size, window) for window in self.windows]

    def _publish(self, sequence: request.Sequence, num_tokens: int, step: int | None) -> None:
        """Offers the full blocks within the first `num_tokens` tokens to others, pending until `step` has run."""
        chain = self._chain(sequence, num_tokens)
        for index in range(sequence.num_published, num_tokens // self.block_size):
            if self._refused is not None and chain[index] in self._refused.hashes:
                self._refused = None
            for group, table in enumerate(sequence.blocks):
                if table[index] != NULL_BLOCK:
                    self.prefix_cache.insert(group, chain[index], table[index], step, sequence)
            sequence.num_published = index + 1

    def _chain(self, sequence: request.Sequence, num_tokens: int) -> list[BlockHash]:
        """Hashes of full blocks, those within the first `num_tokens` tokens at least."""
        chain = self._hashes.setdefault(sequence, [])
        num_blocks = num_tokens // self.block_size
        if len(chain) < num_blocks:
            keys = sequence.request.spec.cache_keys
            extend_chain(chain, sequence.token_ids, self.block_size, num_blocks, keys)
        return chain
