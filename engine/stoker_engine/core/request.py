"""A request and its sequences: known tokens, computed tokens, and KV-cache blocks.

There are no separate prefill and decode phases. A sequence *knows* tokens (the prompt, then the sampled ones) and has
*computed* the keys and values of some; each step computes more of them, as far as the budget allows. When the last
known token is computed, a new one is sampled.

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8         known = 9
        computed          ──────────────────────┤              computed = 8 → next step computes t8, samples t9

A step may be launched while the previous one is in flight: `num_launched` includes the tokens that steps in flight
compute, and a token that is being sampled counts as known, although its id is not known yet (`num_inflight_tokens`):

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8  ?      one is in flight: known = 10
        launched          ──────────────────────────┤          launched = 9, computed = 8

A request starts with one sequence. When its prompt is computed, the sequence forks into the requested number. A fork
that gets a row of the batch at once shares the parent's blocks; a shared block is copied before a sequence writes into
it. Beams may fork at every step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.beam_search import BeamSearch
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs

#: Value of `Sequence.row` while the sequence has no row.
NO_ROW = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence being generated. Only the scheduler modifies it.

    Attributes:
        index: serial number in its request.
        sort_key: queue order; the lowest key is served first.
        token_ids: prompt and output so far.
        num_computed: number of tokens whose keys and values are in the cache.
        num_launched: `num_computed` after all steps in flight have run, without drafts.
        num_inflight_tokens: number of its next tokens that steps in flight sample, without drafts.
        num_published: number of leading blocks that need not be offered to the prefix cache any more.
        epoch: incremented when the sequence is requeued or ends; results from an earlier epoch are discarded.
        row: its row in the runner's batch while it runs, else `NO_ROW`.
        blocks: block table of each group of layers; except for states, block i holds the tokens from i × block_size on.
            `NULL_BLOCK` replaces blocks outside a sliding window.
        candidates: next tokens offered by a beam that waits for the other beams.
        is_blocked: whether the sequence cannot be scheduled before its step in flight is committed.
        adapter_slot: slot of its adapter while it runs, else `NO_ADAPTER`.
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
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_known(self) -> int:
        """Number of known tokens, including those in flight."""
        return len(self.token_ids) + self.num_inflight_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of known tokens that a new step may compute. 0 while the sequence is blocked, or if the tokens in
        flight complete its maximum length."""
        if not self.num_inflight_tokens:
            return len(self.token_ids) - self.num_launched
        known = len(self.token_ids) + self.num_inflight_tokens
        return 0 if self.is_blocked or known >= self.request.max_length else known - self.num_launched

    def append(self, token_id: int) -> None:
        """Append a sampled token, and set `finish_reason` if it ends the sequence."""
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
    """A request and its progress. Only the scheduler modifies it.

    Attributes:
        arrival_key: sort key of its sequences, without their index.
        live: its unfinished sequences; beams in the order of `beams.scores`.
        num_forking: number of forks that start when a step in flight is committed.
        num_cached: number of prompt tokens found in the prefix cache when the request was first scheduled; None before.
        prompt_logprobs: log-probabilities of the prompt tokens after the first, as far as computed.
        beams: state of the beam search, or None.
        id: unique among unfinished requests.
        num_sequences: number of returned sequences.
        max_length: number of tokens, prompt included, at which a sequence ends.
        stop_token_ids, eos_token_ids: tokens that end a sequence.
        wants_prompt_logprobs: whether the logits of each prompt token are needed, so that the whole prompt is computed
            and no cached prefix is used.
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
        # With a grammar, its masks exclude ignored end-of-sequence tokens if possible: see `grammar.masks`.
        ignores_eos = params.ignore_eos and spec.grammar is None
        self.eos_token_ids = frozenset() if ignores_eos else spec.eos_token_ids
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.beams = params.new_beams(spec.max_tokens, self.eos_token_ids)
        self.live = [self.start(spec.prompt_token_ids)]

    @property
    def num_to_fork(self) -> int:
        """Number of sequences that no step forks yet; 0 for a beam search, which forks differently."""
        if self.num_started >= self.num_sequences or self.beams is not None:
            return 0
        return self.num_sequences - self.num_started - self.num_forking

    def start(self, token_ids: list[int]) -> Sequence:
        """Return a new sequence with the known tokens `token_ids`."""
        index, self.num_started = self.num_started, self.num_started + 1
        return Sequence(self, index, (*self.arrival_key, index), list(token_ids))
