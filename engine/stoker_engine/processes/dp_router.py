"""Which engine of the model gets a request: the one that has least to do until it could answer.

    work of an engine  =  prompt tokens that wait there for their first token
                       +  the request's prompt, less the prefix that the engine has seen before
                       +  SEQUENCE_TOKENS × sequences in flight there

The engine with the longest prefix wins, unless what it saves is less than what that engine has to do beyond the least
loaded one: so a conversation stays where its keys and values are, and a prefix that all requests share spreads over as
many engines as the load needs. Engines without room come last: where the request's sequences would exceed those of a
step, or where the KV cache was full and sequences waited when last reported. Ties go to whoever was chosen longest ago.

What an engine has seen is kept by the contract's block-hash chain, over chunks of `CHUNK_TOKENS` or a block, so that a
prompt costs few hashes: as many chunks an engine as its KV cache holds, those used longest ago forgotten first, as the
engine itself does. It is a guess at what the engine still holds: a wrong one costs time, never an answer.

SGLang's cache-aware router and NVIDIA Dynamo's weigh prefixes against load in the same way.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stoker_common.block_hash import NO_KEYS, BlockHash, CacheKeys, extend_chain
from stoker_engine.core.step_report import SchedulerStats

#: Prompt tokens that are hashed at once, where a block has fewer.
CHUNK_TOKENS: Final = 64

#: How many prompt tokens take as long as one sequence's share of the steps that a new request will see.
SEQUENCE_TOKENS: Final = 64

#: Part of a KV cache from which it counts as full, where sequences wait.
FULL: Final = 0.95


@dataclass
class _Request:
    """What an engine works on.

    Attributes:
        waiting: prompt tokens that are to be computed before its first token.
    """

    engine: int
    sequences: int
    waiting: int


@dataclass
class _Engine:
    """What is known of an engine.

    Attributes:
        seen: chunks of prompts it was given, those used last at the end.
        sequences, waiting: in flight there.
        was_full: whether its cache was when it last reported.
        chosen: when it was chosen last.
    """

    seen: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    sequences: int = 0
    waiting: int = 0
    was_full: bool = False
    chosen: int = 0

    def num_seen(self, chunks: Sequence[BlockHash]) -> int:
        """How many chunks of a prompt, from its beginning, it was given."""
        seen = self.seen
        for index, chunk in enumerate(chunks):
            if chunk not in seen:
                return index
        return len(chunks)


class DPRouter:
    """Chooses engines, and keeps count of what they are at. Used by one thread.

    Args:
        num_engines: how many there are.
        block_size: tokens of a block of their KV caches.
        num_blocks: blocks of each.
        max_num_seqs: most sequences in one step of each.
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
        """Chooses an engine for a request and counts it there, until `end`.

        Args:
            sequences: how many it will have.
            keys: what keeps its prefix apart from others'.
            among: the engines that take requests, at least one.
        """
        chunks = self._chunks(prompt_token_ids, keys)
        length = len(prompt_token_ids)
        best, least = -1, (True, 0, 0)
        for engine_index in among:
            engine = self._engines[engine_index]
            # The last token is always computed: its logits are asked for.
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
        """A request has its first token; unknown ids, and later calls, do nothing."""
        request = self._requests.get(request_id)
        if request is not None and request.waiting:
            self._engines[request.engine].waiting -= request.waiting
            request.waiting = 0

    def end(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._engines[request.engine].sequences -= request.sequences
            self._engines[request.engine].waiting -= request.waiting

    def report(self, engine: int, stats: SchedulerStats) -> None:
        """Takes down what an engine says of itself."""
        self._engines[engine].was_full = stats.num_waiting > 0 and stats.kv_cache_usage >= FULL

    def forget(self, engine: int) -> None:
        """An engine has died, and its requests with it: whatever takes its place has seen nothing."""
        for request_id in [name for name, request in self._requests.items() if request.engine == engine]:
            self.end(request_id)
        self._engines[engine].seen.clear()
        self._engines[engine].was_full = False

    def load(self, engine: int) -> tuple[int, int]:
        """(sequences in flight, prompt tokens that wait) of an engine."""
        return self._engines[engine].sequences, self._engines[engine].waiting

    def _chunks(self, token_ids: Sequence[int], keys: CacheKeys) -> list[BlockHash]:
        """The hashes of a prompt's full chunks. One that ends with the prompt does not count: its last token must be
        computed, and with it its block."""
        chunks = list[BlockHash]()
        extend_chain(chunks, token_ids, self.chunk_tokens, max(len(token_ids) - 1, 0) // self.chunk_tokens, keys)
        return chunks

    def _remember(self, engine: _Engine, chunks: Sequence[BlockHash]) -> None:
        """A prefix is of no use without what it begins with, so that is the last to be forgotten."""
        seen = engine.seen
        for chunk in reversed(chunks):
            seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > self._max_chunks:
            seen.popitem(last=False)
