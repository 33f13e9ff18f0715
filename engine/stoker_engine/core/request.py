"""A request and its sequences: the tokens known, how many of them are computed, and the blocks that hold them.

There is no prefill and no decode. A sequence *knows* tokens (prompt, then one more each time it is sampled)
and has *computed* the keys and values of some; each step lets it catch up by as much as the budget allows.
When the last known token is computed, a new one is sampled.

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8         known = 9
        computed          ──────────────────────┤              computed = 8 → next step computes t8, samples t9

A step may be launched while the one before is still in flight. Then `num_launched` runs ahead of `num_computed`, and a
token that is being sampled counts as known, though nobody knows which it is (`num_inflight_tokens`):

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8  ?      one is awaited: known = 10
        launched          ──────────────────────────┤          launched = 9, computed = 8

A request begins with one sequence. When its prompt is computed, that one becomes as many as were asked for: they
share its blocks, and a block is copied when one of them is about to write into it. Beams fork at every step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.beam_search import BeamSearch
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs

#: The row of a sequence that has none.
NO_ROW = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence being generated. Owned by the scheduler; others only read it.

    Attributes:
        index: which of its request's.
        sort_key: the sequence with the lowest is served first.
        token_ids: prompt and output so far.
        num_computed: tokens whose keys and values are in the cache.
        num_launched: those that are once all steps in flight have run.
        num_inflight_tokens: tokens that steps in flight sample.
        num_published: blocks of it that the prefix cache has been offered.
        epoch: incremented at a preemption, an abort or the end; results from an earlier epoch are discarded.
        row: its place in the runner's tables while it runs.
        blocks: for each group of layers, the KV-cache blocks in order; block i holds tokens i × block_size and on.
            `NULL_BLOCK` stands where a window has left one.
        candidates: a beam's offer for the next step, while it waits for the other beams'.
        is_blocked: it cannot be scheduled before the step in flight is committed, which decides how it goes on.
        adapter_slot: the slot of its adapter while it runs.
    """

    request: Request
    index: int
    sort_key: tuple[int, ...]
    token_ids: list[int]
    num_computed: int = 0
    num_launched: int = 0
    num_inflight_tokens: int = 0
    num_published: int = 0
    epoch: int = 0
    row: int = NO_ROW
    blocks: list[list[int]] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    candidates: list[tuple[int, float]] | None = None
    is_blocked: bool = False
    adapter_slot: int = NO_ADAPTER

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_known(self) -> int:
        """Tokens known, or awaited."""
        return len(self.token_ids) + self.num_inflight_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are still to compute; none while it is held, or where what it awaits is
        its last."""
        if not self.num_inflight_tokens:
            return len(self.token_ids) - self.num_launched
        known = len(self.token_ids) + self.num_inflight_tokens
        return 0 if self.is_blocked or known >= self.request.max_length else known - self.num_launched

    def append(self, token_id: int) -> None:
        """Takes in a newly sampled token; sets `finish_reason` if it ends the sequence."""
        self.token_ids.append(token_id)
        request = self.request
        if request.stop_token_ids and token_id in request.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        elif token_id in request.eos_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= request.max_length:
            self.finish_reason = FinishReason.LENGTH


@dataclass(eq=False)
class Request:
    """What was asked for, and what became of it. Owned by the scheduler; others only read it.

    Attributes:
        arrival_key: its sequences' place in line, before their index.
        live: its sequences that are not finished, in order.
        num_started: sequences there have been.
        num_forking: sequences that a step in flight starts.
        num_cached: prompt tokens that a prefix hit saved, at the first time it was scheduled.
        prompt_logprobs: of each prompt token but the first, as far as they are computed.
        beams: the state of a beam search.
        id: unique among all requests.
        num_prompt_tokens: length of the prompt, in tokens.
        num_sequences: how many come back.
        max_length: tokens at which a sequence ends, its prompt included.
        stop_token_ids, eos_token_ids: those that end a sequence.
        wants_prompt_logprobs: whether each prompt token's logits are needed, so that none can come from the prefix
            cache.
    """

    spec: EngineRequest
    arrival_key: tuple[int, ...]
    live: list[Sequence] = field(default_factory=list)
    num_started: int = 0
    num_forking: int = 0
    num_cached: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    beams: BeamSearch | None = None
    id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_sequences: int = field(init=False)
    max_length: int = field(init=False)
    stop_token_ids: SequenceOf[int] = field(init=False)
    eos_token_ids: frozenset[int] = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        spec, params = self.spec, self.spec.params
        self.id = spec.id
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_sequences = spec.num_sequences
        self.max_length = self.num_prompt_tokens + spec.max_tokens
        self.stop_token_ids = params.stop_token_ids or ()
        # Where there is a grammar, no such token comes that is to be ignored: see `grammar.masks`.
        ignores_eos = params.ignore_eos and spec.grammar is None
        self.eos_token_ids = frozenset() if ignores_eos else spec.eos_token_ids
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.beams = params.new_beams(spec.max_tokens, self.eos_token_ids)
        self.live = [self.start(spec.prompt_token_ids)]

    @property
    def num_to_fork(self) -> int:
        """Sequences still to start once the prompt is computed."""
        if self.num_started >= self.num_sequences or self.beams is not None:
            return 0
        return self.num_sequences - self.num_started - self.num_forking

    def start(self, token_ids: list[int]) -> Sequence:
        """A new sequence that knows `token_ids`."""
        index, self.num_started = self.num_started, self.num_started + 1
        return Sequence(self, index, (*self.arrival_key, index), list(token_ids))
