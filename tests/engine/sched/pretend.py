"""A pretend model that checks the cache: what it reads must be what was written for those very tokens.

A real model's keys at a position depend on all tokens up to it, so the pretend cache holds a hash of them. Every
step copies, writes and reads block by block as a runner would, and its next tokens depend on nothing but the tokens
known and the seed: whatever the scheduler does, `expected` says what must come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from stoker_engine.core.batch import Sampled, ScheduledBatch, ScheduledSequence, StepResult
from stoker_engine.core.beam_search import BeamSearch
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduler import Scheduler
from stoker_engine.sizing.cache_groups import NULL_BLOCK, CacheGroup

BLOCK = 4
VOCABULARY = 50
FULL = (CacheGroup(None, (0,), 1),)
HYBRID = (CacheGroup(None, (0,), 1), CacheGroup(10, (1,), 1), CacheGroup(10, (2,), 1), CacheGroup(3, (3,), 1))


def next_token(known: Sequence[int], seed: int) -> int:
    return hash((tuple(known), seed)) % VOCABULARY


def offers(known: Sequence[int], count: int) -> list[tuple[int, float]]:
    scored = [(token, -(hash((tuple(known), token)) % 10007) / 1000) for token in range(VOCABULARY)]
    return sorted(scored, key=lambda offer: -offer[1])[:count]


def expected(request: EngineRequest) -> list[list[int]]:
    """What `request` must give, token by token and beam by beam."""
    prompt = request.prompt_token_ids
    if isinstance(request.params, BeamSearchParams):
        search = BeamSearch(request.params, request.max_tokens, request.eos_token_ids)
        outputs: list[list[int]] = [[]]
        while outputs:
            known = [prompt + output for output in outputs]
            following = search.advance([offers(k, search.num_candidates) for k in known], outputs)
            outputs = [[*outputs[beam.parent], beam.token_id] for beam in following]
        return [beam.token_ids for beam in search.finished]
    sequences = []
    for index in range(request.params.n):
        output: list[int] = []
        while len(output) < request.max_tokens and not (output and output[-1] in request.eos_token_ids):
            output.append(next_token(prompt + output, request.seed + index))
        sequences.append(output)
    return sequences


class Pretend:
    """A scheduler and its pretend runner."""

    def __init__(
        self,
        num_blocks: int = 64,
        seqs: int = 8,
        tokens: int = 16,
        groups: tuple[CacheGroup, ...] = FULL,
        **options: object,
    ) -> None:
        prefix = bool(options.pop("prefix", True))
        kv = KVManager(num_blocks, BLOCK, groups, tokens, prefix)
        self.scheduler = Scheduler(kv, seqs, tokens, **options)  # type: ignore[arg-type]
        self.outputs: dict[str, dict[int, list[int]]] = {}
        self.finished: set[tuple[str, int]] = set()
        self.batches: list[ScheduledBatch] = []
        self._cache: dict[tuple[int, int], object] = {}

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.outputs[request.id] = {}

    def step(self) -> list[TokenDelta]:
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        assert 0 < batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(batch.sequences) <= self.scheduler.max_num_seqs
        assert sum(len(sequence.token_ids) for sequence in batch.sequences) == batch.num_tokens
        copied = {(to, i): self._cache.get((from_, i)) for from_, to in batch.copies for i in range(BLOCK)}
        self._cache.update(copied)
        for sequence in batch.sequences:
            self._write(sequence)
        for sequence in batch.sequences:
            self._read(sequence)
        sampled = [
            Sampled([], candidates=offers(s.known, s.num_candidates))
            if s.num_candidates
            else Sampled([next_token(s.known, s.seed + i) for i in range(s.num_samples)])
            for s in batch.sampling
        ]
        deltas = self.scheduler.commit(batch, StepResult(sampled))
        self.scheduler.check()
        for delta in deltas:
            assert (delta.request_id, delta.index) not in self.finished
            self.outputs[delta.request_id].setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished.add((delta.request_id, delta.index))
        return deltas

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_usable
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def result(self, request_id: str) -> list[list[int]]:
        return [tokens for _, tokens in sorted(self.outputs[request_id].items())]

    def _write(self, sequence: ScheduledSequence) -> None:
        for table, group in zip(sequence.blocks, range(len(sequence.blocks)), strict=True):
            for position in range(sequence.start, sequence.end):
                assert sequence.known[position] == sequence.token_ids[position - sequence.start]
                block = table[position // BLOCK]
                assert block != NULL_BLOCK
                self._cache[block, position % BLOCK] = (group, hash(tuple(sequence.known[: position + 1])))

    def _read(self, sequence: ScheduledSequence) -> None:
        for group, table in enumerate(sequence.blocks):
            window = self.scheduler.kv.windows[group]
            first = 0 if window is None else max(0, sequence.start - window + 1)
            for position in range(first, sequence.end):
                held = self._cache[table[position // BLOCK], position % BLOCK]
                assert held == (group, hash(tuple(sequence.known[: position + 1])))


def sampling(name: str, prompt: list[int], max_tokens: int = 4, n: int = 1, **rest: object) -> EngineRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return EngineRequest(name, prompt, params, max_tokens, seed=crc32(name.encode()) % 1000, **rest)  # type: ignore[arg-type]


def beams(name: str, prompt: list[int], width: int, max_tokens: int = 4, **options: object) -> EngineRequest:
    params = BeamSearchParams(width, max_tokens, **options)  # type: ignore[arg-type]
    return EngineRequest(name, prompt, params, max_tokens, eos_token_ids=frozenset({0, 1, 2}))
