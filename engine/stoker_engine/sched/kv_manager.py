"""Gives requests their KV-cache blocks, and shares those whose prefix is already computed."""

from __future__ import annotations

from collections.abc import Iterable

from stoker_engine.contract.block_hash import BlockHash, block_hash, root_hash
from stoker_engine.core.request import Request
from stoker_engine.sched.block_pool import BlockPool
from stoker_engine.sched.prefix_cache import PrefixCache


class KVManager:
    """Owner of the block pool, the prefix cache and every request's block table.

    Args:
        num_blocks: blocks in the KV cache.
        block_size: tokens in a block.
        enable_prefix_caching: whether full blocks are remembered and shared.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.forget)
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of them, found
        self._hashes: dict[str, list[BlockHash]] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def admit(self, request: Request) -> bool:
        """Takes over cached blocks of the request's prefix, if there is room for all its known tokens.

        At least the last known token is left to compute, since its logits are needed. Room for the whole
        sequence is asked here, not reserved: admitting what would soon be preempted wastes work.
        """
        assert not request.blocks and request.num_computed == 0
        matched = self._match(request)
        needed = self._num_blocks(len(request.token_ids)) - len(matched)
        available = self.pool.num_free - sum(self.pool.is_free(block) for block in matched)
        if needed > available:
            return False
        for block in matched:
            self.pool.acquire(block)
        request.blocks = matched
        request.num_computed = len(matched) * self.block_size
        if self.enable_prefix_caching and request.num_preemptions == 0:
            self.queries += len(request.token_ids)
            self.hits += request.num_computed
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extends the block table to hold `num_tokens` more computed tokens. False: not enough free blocks."""
        end = request.num_computed + num_tokens
        missing = self._num_blocks(end) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.blocks += self.pool.allocate(missing)
        self._remember(request, end)
        return True

    def free(self, request: Request) -> None:
        """Returns all blocks; the last one first, so that prefixes outlive their continuations."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.num_computed = 0
        self._hashes.pop(request.id, None)

    def check(self, requests: Iterable[Request]) -> None:
        """Asserts that pool, cache and the block tables of all live `requests` balance."""
        live = list(requests)
        self.pool.check(request.blocks for request in live)
        self.prefix_cache.check()
        for request in live:
            assert len(request.blocks) >= self._num_blocks(request.num_computed)
            assert len(request.blocks) <= self._num_blocks(len(request.token_ids))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _match(self, request: Request) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        return self.prefix_cache.longest_match(self._chain(request, len(request.token_ids) - 1))

    def _remember(self, request: Request, end: int) -> None:
        """Publishes the blocks that are full once this step has run.

        They are published before: all keys and values of a step are written, layer by layer, before any
        attention of that layer reads them, so even requests of the same step can share them.
        """
        if not self.enable_prefix_caching:
            return
        first = request.num_computed // self.block_size
        for index, block_hash_ in enumerate(self._chain(request, end)[first:], start=first):
            self.prefix_cache.insert(block_hash_, request.blocks[index])

    def _chain(self, request: Request, num_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks within the first `num_tokens` tokens."""
        chain = self._hashes.setdefault(request.id, [])
        full = num_tokens // self.block_size
        while len(chain) < full:
            start = len(chain) * self.block_size
            parent = chain[-1] if chain else root_hash()
            chain.append(block_hash(parent, request.token_ids[start : start + self.block_size]))
        return chain[:full]
