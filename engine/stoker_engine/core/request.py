"""A request and its sequences: the tokens known, how many of them are computed, and the blocks that hold them.

There is no prefill and no decode. A sequence *knows* tokens (prompt, then one more each time it is sampled)
and has *computed* the keys and values of some; each step lets it catch up by as much as the budget allows.
When the last known token is computed, a new one is sampled.

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8         known = 9
        computed          ──────────────────────┤              computed = 8 → next step computes t8, samples t9

A request begins with one sequence. When its prompt is computed, that one becomes as many as were asked for: they
share its blocks, and a block is copied when one of them is about to write into it. Beams fork at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.beam_search import BeamSearch
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.token_counts import TokenCounts


@dataclass(eq=False)
class Sequence:
    """One sequence being generated. Owned by the scheduler; others only read it.

    Attributes:
        id: unique among all sequences.
        index: which of its request's.
        key: its place in line; the lowest is served first.
        token_ids: prompt and output so far.
        num_computed: tokens whose keys and values are in the cache.
        blocks: for each group of layers, the KV-cache blocks in order; block i holds tokens i × block_size and on.
            `NULL_BLOCK` stands where a window has left one.
        candidates: a beam's offer for the next step, while it waits for the other beams'.
        counts: how often its output holds which token, where that is penalised.
    """

    request: Request
    index: int
    key: tuple[int, ...]
    token_ids: list[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    candidates: list[tuple[int, float]] | None = None
    counts: TokenCounts | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.request.id}#{self.index}"

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are still to compute."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int) -> None:
        """Takes in a newly sampled token; sets `finish_reason` if it ends the sequence."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        asked, params = self.request.asked, self.request.asked.params
        if token_id in params.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        elif token_id in asked.eos_token_ids and not params.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= asked.max_tokens:
            self.finish_reason = FinishReason.LENGTH


@dataclass(eq=False)
class Request:
    """What was asked for, and what became of it. Owned by the scheduler; others only read it.

    Attributes:
        line: its sequences' place in line, before their index.
        live: its sequences that are not finished, in order.
        num_started: sequences there have been.
        num_cached: prompt tokens that a prefix hit saved, at the first time it was scheduled.
        prompt_logprobs: of each prompt token but the first, as far as they are computed.
        beams: the state of a beam search.
        rules: what is done to its sequences' logits; None: nothing.
    """

    asked: EngineRequest
    line: tuple[int, ...]
    live: list[Sequence] = field(default_factory=list)
    num_started: int = 0
    num_cached: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    beams: BeamSearch | None = None
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        params = self.asked.params
        if isinstance(params, BeamSearchParams):
            eos = frozenset[int]() if params.ignore_eos else self.asked.eos_token_ids
            self.beams = BeamSearch(params, self.asked.max_tokens, eos | frozenset(params.stop_token_ids))
        self.rules = LogitRules.of(self.asked)
        prompt = self.asked.prompt_token_ids
        self.live = [self.start(prompt, None if self.rules is None else self.rules.counts(prompt))]

    @property
    def id(self) -> str:
        """Unique among all requests."""
        return self.asked.id

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.asked.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether each prompt token's logits are needed, so that none can come from the prefix cache."""
        return isinstance(self.asked.params, SamplingParams) and self.asked.params.prompt_logprobs is not None

    @property
    def num_to_fork(self) -> int:
        """Sequences still to start once the prompt is computed."""
        return 0 if self.beams else self.asked.num_sequences - self.num_started

    def start(self, token_ids: list[int], counts: TokenCounts | None) -> Sequence:
        """A new sequence that knows `token_ids`, which `counts` has counted."""
        index, self.num_started = self.num_started, self.num_started + 1
        return Sequence(self, index, (*self.line, index), list(token_ids), counts=counts)
