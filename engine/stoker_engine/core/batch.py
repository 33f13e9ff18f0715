"""What the scheduler hands to the runner, one step's work as plain facts, and what the runner hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.token_counts import TokenCounts


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        token_ids: the tokens to compute now, in order.
        start: position of the first of them; everything before is in the cache.
        blocks: block tables by group, covering at least ``start + len(token_ids)`` tokens.
        num_samples: how many next tokens to draw; 0 where `token_ids` do not reach the last known token.
        seed: of the sampler, which draws sample i by (seed + i, position) alone.
        known: all tokens known, the first `num_prompt_tokens` of them the prompt's.
        rules: what its request asks to be done to its logits; None: nothing.
        counts: the tokens it holds, where they are penalised.
        may_end: whether it has the tokens that it must have before it ends (min_tokens).
        num_candidates: of a beam: how many likeliest next tokens are wanted.
        num_prompt_logprobs: prompt positions whose log-probabilities are known from earlier steps.
        request_id: of the request that it belongs to.
    """

    id: str
    token_ids: list[int]
    start: int
    blocks: list[list[int]]
    num_samples: int
    params: SamplingParams | BeamSearchParams
    seed: int
    known: list[int]
    num_prompt_tokens: int
    rules: LogitRules | None = None
    counts: TokenCounts | None = None
    may_end: bool = True
    num_candidates: int = 0
    num_prompt_logprobs: int = 0
    request_id: str = ""

    @property
    def end(self) -> int:
        """Position after the last token computed in this step."""
        return self.start + len(self.token_ids)

    @property
    def prompt_positions(self) -> range:
        """Positions in this step whose logits tell a prompt token's log-probability, where that is asked for."""
        if isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None:
            return range(max(self.start, self.num_prompt_logprobs), min(self.end, self.num_prompt_tokens - 1))
        return range(0)


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: its sequences, how many tokens that is, and the blocks to copy first, as (from, to)."""

    sequences: list[ScheduledSequence]
    num_tokens: int
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that get a new token, in order."""
        return [sequence for sequence in self.sequences if sequence.num_samples]


@dataclass(frozen=True)
class Sampled:
    """What was drawn for one sequence.

    Attributes:
        token_ids: `num_samples` tokens.
        logprobs: of each of them, when asked for.
        candidates: of a beam: (token, log-probability), best first.
        is_corrupted: its logits are no numbers that a token can be chosen by, so that nothing was drawn.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    candidates: list[tuple[int, float]] | None = None
    is_corrupted: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Attributes:
        sampled: for each of ``batch.sampling``, in order.
        prompt_logprobs: by sequence id, for each of its `prompt_positions`; None where they are no numbers.
        prepare_time, model_time, sample_time: seconds.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[str, list[TokenLogprobs] | None] = field(default_factory=dict)
    prepare_time: float = 0.0
    model_time: float = 0.0
    sample_time: float = 0.0
