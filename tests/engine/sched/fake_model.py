"""A fake model that checks the cache: what it reads must have been written for exactly these tokens.

A real model's keys at a position depend on all tokens up to it, so the fake cache holds a hash of them. Every step
copies, writes and reads block by block like a runner, and its next tokens depend only on the known tokens and the seed:
`expected` gives the output, whatever the scheduler does.

It knows about sequences only what steps contain (`core.step`), in its own rows. With several steps in flight it runs a
step as late as possible. A request in `spoiled` computes poison in steps whose logits show it; poison spreads to every
sequence that reads it. With several batches it is a pipeline: it lacks a sampled token until a step contains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.step import KNOWN_ENTRY, TABLE_ENTRY, Sampled, Step, StepResult
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.scheduler import Scheduler
from stoker_engine.sizing.cache_groups import NULL_BLOCK, CacheGroup

BLOCK = 4
VOCABULARY = 50
FULL = (CacheGroup(None, (0,), 1),)
HYBRID = (CacheGroup(None, (0,), 1), CacheGroup(10, (1,), 1), CacheGroup(10, (2,), 1), CacheGroup(3, (3,), 1))


#: State groups: with a token group, and alone.
STATES = (CacheGroup(None, (0,), 1), CacheGroup(None, (1,), 0, "state", 8, 2))
ONLY_STATES = (CacheGroup(None, (0,), 0, "state", 12, 3),)
POISON = "poison"


@dataclass
class Share:
    """A sequence's part of a step, for inspection by tests."""

    id: str
    start: int
    token_ids: list[int]
    blocks: list[list[int]]


@dataclass
class Batch:
    """A step, for inspection by tests."""

    sequences: list[Share]
    num_tokens: int
    copies: list[tuple[int, int]]


@dataclass
class Row:
    """The fake runner's state of a sequence."""

    spec: EngineRequest
    index: int
    token_ids: list[int]
    blocks: list[list[int]]
    num_candidates: int = 0
    adapter_slot: int = NO_ADAPTER

    def key(self, token_ids: Sequence[int]) -> int:
        """Return the cache entry of the last token, which depends on all tokens and the adapter."""
        return hash((self.spec.adapter, *token_ids))

    @property
    def seed(self) -> int:
        return self.spec.seed + self.index


def next_token(known: Sequence[int], seed: int) -> int:
    return hash((tuple(known), seed)) % VOCABULARY


def offers(known: Sequence[int], count: int) -> list[tuple[int, float]]:
    scored = [(token, -(hash((tuple(known), token)) % 10007) / 1000) for token in range(VOCABULARY)]
    return sorted(scored, key=lambda offer: -offer[1])[:count]


def expected(request: EngineRequest) -> list[list[int]]:
    """Return the expected output of `request`, by sequence or beam."""
    prompt = request.prompt_token_ids
    if isinstance(request.params, BeamSearchParams):
        search = request.params.new_beams(request.max_tokens, request.eos_token_ids)
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


class FakeModel:
    """A scheduler with its fake runner.

    Attributes:
        spoiled: requests whose logits are NaN.
        takes: returns the seconds of a step; 0 if it was not measured.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        seqs: int = 8,
        tokens: int = 16,
        groups: tuple[CacheGroup, ...] = FULL,
        in_flight: int = 1,
        **options: object,
    ) -> None:
        prefix = bool(options.pop("prefix", True))
        if "max_itl" not in options:
            options.setdefault("long_prefill_token_threshold", 0)
        kv = KVManager(num_blocks, BLOCK, groups, tokens, prefix)
        self.scheduler = Scheduler(kv, seqs, tokens, **options)  # type: ignore[arg-type]
        self.outputs: dict[str, dict[int, list[int]]] = {}
        self.finished: set[tuple[str, int]] = set()
        self.batches: list[Batch] = []
        self.spoiled: set[str] = set()
        self.takes: Callable[[Scheduled], float] = lambda scheduled: 0.0
        self._groups = groups
        self._max_in_flight = in_flight
        self._is_pipeline = int(str(options.get("num_batches", 1))) > 1
        self._in_flight: deque[Scheduled] = deque()
        self._rows: dict[int, Row] = {}
        self._adapter_in: dict[int, int] = {}  # by slot
        self._cache: dict[tuple[int, int], object] = {}

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.outputs[request.id] = {}

    def step(self) -> list[TokenDelta]:
        self.launch()
        scheduled = self._in_flight.popleft()
        result = self._run(scheduled)
        deltas = self.scheduler.commit(scheduled, result, self.takes(scheduled))
        self.scheduler.check()
        for delta in deltas:
            assert (delta.request_id, delta.index) not in self.finished
            self.outputs[delta.request_id].setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished.add((delta.request_id, delta.index))
        return deltas

    def launch(self) -> None:
        """Launch as many steps as may be in flight."""
        while len(self._in_flight) < self._max_in_flight and (scheduled := self.scheduler.schedule()) is not None:
            self.scheduler.check()
            self._in_flight.append(scheduled)

    def discard_in_flight(self) -> None:
        """Drop all steps in flight, and all rows."""
        self._in_flight.clear()
        self._rows.clear()
        self._adapter_in.clear()
        self.scheduler.discard_in_flight()
        self.scheduler.check()

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_usable
                cached = self.scheduler.kv.prefix_cache._key_of
                assert all(self._cache[block, i] != POISON for block in cached for i in range(BLOCK))
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def result(self, request_id: str) -> list[list[int]]:
        return [tokens for _, tokens in sorted(self.outputs[request_id].items())]

    def _run(self, scheduled: Scheduled) -> StepResult:
        step = scheduled.step
        self._apply(step)
        assert 0 < step.num_tokens == sum(step.lengths) <= self.scheduler.max_num_batched_tokens
        assert len(set(step.rows)) == len(step.rows) <= self.scheduler.max_num_seqs
        assert list(step.lengths[: step.num_decodes]) == [1] * step.num_decodes
        drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
        batch = [self._rows[row] for row in step.rows]
        if self.scheduler.adapters is not None:
            assert all(self._adapter_in.get(row.adapter_slot, NO_ADAPTER) == row.spec.adapter for row in batch)
        known = []  # for each, tokens up to the last computed one
        shares = []
        for batch_index, (row, start, length) in enumerate(zip(batch, step.starts, step.lengths, strict=True)):
            draft = drafts.get(batch_index, [])
            known.append([*row.token_ids[: start + length - len(draft)], *draft])
            assert len(known[-1]) == start + length
            sequence = scheduled.sequences[batch_index]
            if sequence.epoch == scheduled.epochs[batch_index]:
                num_known = min(len(sequence.token_ids), start + length - len(draft))
                assert known[-1][:num_known] == sequence.token_ids[:num_known]
            blocks = [list(table) for table in row.blocks]
            shares.append(Share(f"{row.spec.id}#{row.index}", start, known[-1][start:], blocks))
        self.batches.append(Batch(shares, step.num_tokens, step.copies))

        assert len({to for _, to in step.copies}) == len(step.copies)
        copied = {(to, i): self._cache.get((from_, i)) for from_, to in step.copies for i in range(BLOCK)}
        self._cache.update(copied)
        spoiled = [row.spec.id in self.spoiled and step.num_samples[p] > 0 for p, row in enumerate(batch)]
        for batch_index, row in enumerate(batch):
            self._write(row, step.starts[batch_index], known[batch_index], spoiled[batch_index])
        spreads = True
        while spreads:
            spreads = False
            for batch_index, row in enumerate(batch):
                if not spoiled[batch_index] and self._reads_poison(row, step.starts[batch_index], known[batch_index]):
                    self._write(row, step.starts[batch_index], known[batch_index], True)
                    spoiled[batch_index] = spreads = True

        sampled = []
        for batch_index, row in enumerate(batch):
            if step.num_samples[batch_index]:
                draft = drafts.get(batch_index, [])
                if row.spec.id in self.spoiled:
                    sampled.append(Sampled([], is_corrupted=True))
                    if not self._is_pipeline:
                        row.token_ids[len(known[batch_index]) - len(draft) :] = [0]  # a step in flight may read it
                    continue
                drawn = self._sample(
                    row, known[batch_index], step.num_samples[batch_index], draft, spoiled[batch_index]
                )
                sampled.append(drawn)
                if drawn.token_ids and not self._is_pipeline:
                    row.token_ids[len(known[batch_index]) - len(draft) :] = drawn.token_ids[0]
        return StepResult(sampled)

    def _sample(self, row: Row, known: list[int], num_samples: int, draft: list[int], spoiled: bool) -> Sampled:
        wrong = int(spoiled)  # sampling from poison gives another token
        if row.num_candidates:
            return Sampled([], candidates=offers([*known, wrong] if spoiled else known, row.num_candidates))
        if num_samples > 1:
            assert not draft
            return Sampled([[(next_token(known, row.seed + i) + wrong) % VOCABULARY] for i in range(num_samples)])
        held: list[int] = []
        certain = known[: len(known) - len(draft)]
        for drafted in (*draft, None):
            held.append((next_token([*certain, *held], row.seed) + wrong) % VOCABULARY)
            if held[-1] != drafted:
                break
        return Sampled([held])

    def _apply(self, step: Step) -> None:
        self._adapter_in.update(step.adapters)
        for fork in step.forks:
            parent = self._rows[fork.parent]
            tokens = parent.token_ids[: fork.num_tokens]
            blocks = [table[:count] for table, count in zip(parent.blocks, fork.num_blocks, strict=True)]
            assert len(tokens) == fork.num_tokens
            row = Row(parent.spec, fork.index, tokens, blocks, parent.num_candidates, parent.adapter_slot)
            self._rows[fork.row] = row
        for new in step.new:
            tokens = [*new.spec.prompt_token_ids, *new.output_token_ids]
            blocks = [list(table) for table in new.blocks]
            self._rows[new.row] = Row(new.spec, new.index, tokens, blocks, new.num_candidates, new.adapter_slot)
        for row, position, token_ids in step.written:
            self._rows[row].token_ids[position:] = token_ids
            assert len(self._rows[row].token_ids) == position + len(token_ids)
        for entry in range(0, len(step.known), KNOWN_ENTRY):
            row, position, token = step.known[entry : entry + KNOWN_ENTRY]
            self._rows[row].token_ids[position:] = [token]
            assert len(self._rows[row].token_ids) == position + 1
        for entry in range(0, len(step.tables), TABLE_ENTRY):
            group, row, index, block = step.tables[entry : entry + TABLE_ENTRY]
            table = self._rows[row].blocks[group]
            table += [NULL_BLOCK] * (index + 1 - len(table))
            table[index] = block

    def _write(self, row: Row, start: int, known: list[int], spoiled: bool) -> None:
        for group, table in enumerate(row.blocks):
            if self._groups[group].kind == "state":
                assert len(table) == self._groups[group].blocks_per_sequence and NULL_BLOCK not in table
                before = {self._cache.get((block, 0)) for block in table}
                assert not start or before == {POISON} or before == {(group, row.key(known[:start]))}
                spoiled = spoiled or (start > 0 and POISON in before)
                for block in table:
                    self._cache[block, 0] = POISON if spoiled else (group, row.key(known))
                continue
            for position in range(start, len(known)):
                block = table[position // BLOCK]
                assert block != NULL_BLOCK
                held = POISON if spoiled else (group, row.key(known[: position + 1]))
                self._cache[block, position % BLOCK] = held

    def _reads_poison(self, row: Row, start: int, known: list[int]) -> bool:
        """Return whether it reads poison; all else that it reads must belong to its own tokens."""
        for group, table in enumerate(row.blocks):
            if self._groups[group].kind == "state":
                continue
            window = self.scheduler.kv.windows[group]
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, len(known)):
                held = self._cache[table[position // BLOCK], position % BLOCK]
                if held == POISON:
                    return True
                assert held == (group, row.key(known[: position + 1]))
        return False


class Oracle:
    """A proposer that knows the output of known requests, and is sometimes wrong."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._added: list[EngineRequest] = []

    def expect(self, request: EngineRequest) -> None:
        self._added.append(request)

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        known = list(token_ids)
        spec = [r for r in self._added if known[: len(r.prompt_token_ids)] == r.prompt_token_ids]
        draft: list[int] = []
        seed = self._rng.choice(spec).seed + self._rng.randrange(2) if spec else 0
        while len(draft) < self._rng.randrange(max_tokens + 1):
            right = next_token([*known, *draft], seed)
            draft.append(right if self._rng.random() < 0.8 else self._rng.randrange(VOCABULARY))
        return draft


def sampling(name: str, prompt: list[int], max_tokens: int = 4, n: int = 1, **rest: object) -> EngineRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return EngineRequest(name, prompt, params, max_tokens, seed=crc32(name.encode()) % 1000, **rest)  # type: ignore[arg-type]


def beams(name: str, prompt: list[int], width: int, max_tokens: int = 4, **options: object) -> EngineRequest:
    params = BeamSearchParams(width, max_tokens, **options)  # type: ignore[arg-type]
    return EngineRequest(name, prompt, params, max_tokens, eos_token_ids=frozenset({0, 1, 2}))
