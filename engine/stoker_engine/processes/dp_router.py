"""Which copy of the model gets a request: the one that has least to do until it could answer.

    work of a copy =  prompt tokens that wait there for their first token
                   +  the request's prompt, less the prefix that the copy has seen before
                   +  SEQUENCE_TOKENS × sequences in flight there

The copy with the longest prefix wins, unless what it saves is less than what that copy has to do beyond the least
loaded one: so a conversation stays where its keys and values are, and a prefix that all requests share spreads over as
many copies as the load needs. Copies without room come last: where the request's sequences would exceed those of a
step, or where the KV cache was full and sequences waited when last reported. Ties go to whoever was chosen longest ago.

What a copy has seen is kept by the contract's block-hash chain, over chunks of `CHUNK_TOKENS` or a block, so that a
prompt costs few hashes: as many chunks a copy as its KV cache holds, those used longest ago forgotten first, as the
copy itself does. It is a guess at what the copy still holds: a wrong one costs time, never an answer.

SGLang's cache-aware router and NVIDIA Dynamo's weigh prefixes against load likewise.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stoker_common.block_hash import BlockHash, block_hash, root_hash
from stoker_engine.core.step_report import SchedulerStats

#: Prompt tokens that are hashed at once, where a block has fewer.
CHUNK_TOKENS: Final = 64

#: How many prompt tokens take as long as one sequence's share of the steps that a new request will see.
SEQUENCE_TOKENS: Final = 64

#: Part of a KV cache from which it counts as full, where sequences wait.
FULL: Final = 0.95


@dataclass
class _Request:
    """What a copy works on.

    Attributes:
        waiting: prompt tokens that are to be computed before its first token.
    """

    copy: int
    sequences: int
    waiting: int


@dataclass
class _Copy:
    """What is known of a copy.

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
        for number, chunk in enumerate(chunks):
            if chunk not in seen:
                return number
        return len(chunks)


class CopyRouter:
    """Chooses copies, and keeps count of what they are at. Used by one thread.

    Args:
        num_copies: how many there are.
        block_size: tokens of a block of their KV caches.
        num_blocks: blocks of each.
        max_num_seqs: most sequences in one step of each.
    """

    def __init__(self, num_copies: int, block_size: int, num_blocks: int, max_num_seqs: int) -> None:
        self.chunk_tokens = max(block_size, CHUNK_TOKENS // block_size * block_size)
        self._most_chunks = max(1, num_blocks * block_size // self.chunk_tokens)
        self._max_num_seqs = max_num_seqs
        self._copies = [_Copy() for _ in range(num_copies)]
        self._requests: dict[str, _Request] = {}
        self._turns = itertools.count(1)

    def begin(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sequences: int,
        salt: str = "",
        *,
        among: Sequence[int],
    ) -> int:
        """Chooses a copy for a request and counts it there, until `end`.

        Args:
            sequences: how many it will have.
            salt: keeps its prefix apart from others'.
            among: the copies that take requests, at least one.
        """
        chunks = self._chunks(prompt_token_ids, salt)
        length = len(prompt_token_ids)
        best, least = -1, (True, 0, 0)
        for number in among:
            copy = self._copies[number]
            # The last token is always computed: its logits are asked for.
            computed = max(1, length - self.chunk_tokens * copy.num_seen(chunks))
            work = copy.waiting + computed + SEQUENCE_TOKENS * copy.sequences
            is_full = copy.was_full or copy.sequences + sequences > self._max_num_seqs
            rank = (is_full, work, copy.chosen)
            if best < 0 or rank < least:
                best, least, waiting = number, rank, computed
        copy = self._copies[best]
        copy.chosen = next(self._turns)
        copy.sequences += sequences
        copy.waiting += waiting
        self._requests[request_id] = _Request(best, sequences, waiting)
        self._remember(copy, chunks)
        return best

    def has_begun(self, request_id: str) -> None:
        """A request has its first token; unknown ids, and later calls, do nothing."""
        request = self._requests.get(request_id)
        if request is not None and request.waiting:
            self._copies[request.copy].waiting -= request.waiting
            request.waiting = 0

    def end(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._copies[request.copy].sequences -= request.sequences
            self._copies[request.copy].waiting -= request.waiting

    def report(self, copy: int, stats: SchedulerStats) -> None:
        """Takes down what a copy says of itself."""
        self._copies[copy].was_full = stats.num_waiting > 0 and stats.kv_cache_usage >= FULL

    def forget(self, copy: int) -> None:
        """A copy has died, and its requests with it: whatever takes its place has seen nothing."""
        for request_id in [name for name, request in self._requests.items() if request.copy == copy]:
            self.end(request_id)
        self._copies[copy].seen.clear()
        self._copies[copy].was_full = False

    def load(self, copy: int) -> tuple[int, int]:
        """(sequences in flight, prompt tokens that wait) of a copy."""
        return self._copies[copy].sequences, self._copies[copy].waiting

    def _chunks(self, token_ids: Sequence[int], salt: str) -> list[BlockHash]:
        """The hashes of a prompt's full chunks. One that ends with the prompt does not count: its last token must be
        computed, and with it its block."""
        size, parent, chunks = self.chunk_tokens, root_hash(salt), list[BlockHash]()
        for start in range(0, len(token_ids) - size, size):
            parent = block_hash(parent, token_ids[start : start + size])
            chunks.append(parent)
        return chunks

    def _remember(self, copy: _Copy, chunks: Sequence[BlockHash]) -> None:
        """A prefix is of no use without what it begins with, so that is the last to be forgotten."""
        seen = copy.seen
        for chunk in reversed(chunks):
            seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > self._most_chunks:
            seen.popitem(last=False)
