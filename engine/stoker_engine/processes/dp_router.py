"""Chooses one of the model's engines for a request: the engine with the least work until it could answer.

    work of an engine  =  prompt tokens to compute for its requests that wait for their first token
                       +  the request's prompt tokens, without the prefix that the engine has seen
                       +  SEQUENCE_TOKENS × its sequences in flight

The engine with the longest prefix wins, unless its additional load exceeds what the prefix saves. A conversation
therefore stays where its keys and values are, and a prefix shared by all requests spreads over as many engines as the
load needs. Engines without capacity come last: if the request's sequences would exceed the maximum number of sequences
in a step, or if the KV cache was full and sequences waited at the last report. Ties go to the engine that was not
chosen for the longest time.

An engine's seen prefixes are recorded as a hash chain (`stoker_common.block_hash`) over chunks of up to `CHUNK_TOKENS`,
at least a block, so that a prompt needs few hashes. As many chunks are recorded as fit the engine's KV cache, with LRU
eviction as in the engine. The record is an estimate: an error costs time, but does not change results.

SGLang's cache-aware router and NVIDIA Dynamo's router also weigh prefixes against load.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stoker_common.block_hash import NO_KEYS, BlockHash, CacheKeys, extend_chain
from stoker_engine.core.step_report import SchedulerStats

#: Maximum number of prompt tokens per hash, unless a block has more.
CHUNK_TOKENS: Final = 64

#: Number of prompt tokens whose computation slows a new request as much as one running sequence does.
SEQUENCE_TOKENS: Final = 64

#: Usage of the KV cache, as a fraction, from which it counts as full if sequences wait.
FULL: Final = 0.95


@dataclass
class _Request:
    """A request in flight at an engine.

    Attributes:
        waiting: number of prompt tokens to compute before its first token; 0 afterwards.
    """

    engine: int
    sequences: int
    waiting: int


@dataclass
class _Engine:
    """The router's record of an engine.

    Attributes:
        seen: hashes of the chunks of prompts sent to it, in LRU order with the most recent last.
        sequences, waiting: number of sequences in flight, and of prompt tokens to compute before first tokens.
        was_full: whether its KV cache was full and sequences waited at the last report.
        chosen: value of the choice counter when it was last chosen; 0: never.
    """

    seen: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    sequences: int = 0
    waiting: int = 0
    was_full: bool = False
    chosen: int = 0

    def num_seen(self, chunks: Sequence[BlockHash]) -> int:
        """Return how many of a prompt's first chunks the engine has seen."""
        seen = self.seen
        for index, chunk in enumerate(chunks):
            if chunk not in seen:
                return index
        return len(chunks)


class DPRouter:
    """Chooses engines, and tracks their load. Not thread-safe.

    Args:
        block_size: tokens per block of the KV caches.
        num_blocks: blocks per engine.
        max_num_seqs: maximum number of sequences in a step of an engine.
    """

    def __init__(self, num_engines: int, block_size: int, num_blocks: int, max_num_seqs: int) -> None:
        self.chunk_tokens = max(block_size, CHUNK_TOKENS // block_size * block_size)
        self._max_chunks = max(1, num_blocks * block_size // self.chunk_tokens)
        self._max_num_seqs = max_num_seqs
        self._engines = [_Engine() for _ in range(num_engines)]
        self._requests: dict[str, _Request] = {}
        self._choice_numbers = itertools.count(1)

    def begin(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sequences: int,
        keys: CacheKeys = NO_KEYS,
        *,
        among: Sequence[int],
    ) -> int:
        """Choose an engine for a request, count the request there until `end`, and return the engine's index.

        Args:
            sequences: number of the request's sequences.
            keys: keys that separate its prefix from others.
            among: indices of the engines to choose from, at least one.
        """
        chunks = self._chunks(prompt_token_ids, keys)
        length = len(prompt_token_ids)
        best, least = -1, (True, 0, 0)
        for engine_index in among:
            engine = self._engines[engine_index]
            # The last token is always computed, because its logits are needed.
            computed = max(1, length - self.chunk_tokens * engine.num_seen(chunks))
            work = engine.waiting + computed + SEQUENCE_TOKENS * engine.sequences
            is_full = engine.was_full or engine.sequences + sequences > self._max_num_seqs
            rank = (is_full, work, engine.chosen)
            if best < 0 or rank < least:
                best, least, waiting = engine_index, rank, computed
        engine = self._engines[best]
        engine.chosen = next(self._choice_numbers)
        engine.sequences += sequences
        engine.waiting += waiting
        self._requests[request_id] = _Request(best, sequences, waiting)
        self._remember(engine, chunks)
        return best

    def mark_started(self, request_id: str) -> None:
        """Record a request's first token. Unknown ids and later calls have no effect."""
        request = self._requests.get(request_id)
        if request is not None and request.waiting:
            self._engines[request.engine].waiting -= request.waiting
            request.waiting = 0

    def end(self, request_id: str) -> None:
        """Remove a request that has ended; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._engines[request.engine].sequences -= request.sequences
            self._engines[request.engine].waiting -= request.waiting

    def report(self, engine: int, stats: SchedulerStats) -> None:
        """Record whether an engine's KV cache is full and sequences wait."""
        self._engines[engine].was_full = stats.num_waiting > 0 and stats.kv_cache_usage >= FULL

    def forget(self, engine: int) -> None:
        """Reset the record of an engine that has a new process, and remove its requests."""
        for request_id in [name for name, request in self._requests.items() if request.engine == engine]:
            self.end(request_id)
        self._engines[engine].seen.clear()
        self._engines[engine].was_full = False

    def load(self, engine: int) -> tuple[int, int]:
        """Return an engine's number of sequences in flight, and of prompt tokens to compute before first tokens."""
        return self._engines[engine].sequences, self._engines[engine].waiting

    def _chunks(self, token_ids: Sequence[int], keys: CacheKeys) -> list[BlockHash]:
        """Return the hashes of a prompt's full chunks, except a chunk with the prompt's last token: that token must be
        computed, and with it its block."""
        chunks = list[BlockHash]()
        extend_chain(chunks, token_ids, self.chunk_tokens, max(len(token_ids) - 1, 0) // self.chunk_tokens, keys)
        return chunks

    def _remember(self, engine: _Engine, chunks: Sequence[BlockHash]) -> None:
        """Record a prompt's chunks. Its first chunks are evicted last, because later ones are useless without them."""
        seen = engine.seen
        for chunk in reversed(chunks):
            seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > self._max_chunks:
            seen.popitem(last=False)
