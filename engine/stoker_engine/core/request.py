"""A request: the tokens known, how many of them are computed, and the blocks that hold them.

There is no prefill and no decode. A request *knows* tokens (prompt, then one more each time it is sampled)
and has *computed* the keys and values of some; each step lets it catch up by as much as the budget allows.
When the last known token is computed, a new one is sampled.

        prompt + output   t0 t1 t2 t3 t4 t5 t6 t7 │ t8         known = 9
        computed          ──────────────────────┤              computed = 8 → next step computes t8, samples t9
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from stoker_engine.core.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended. `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One sequence being generated. Owned by the scheduler; others only read it.

    Attributes:
        token_ids: prompt and output so far.
        num_computed: tokens whose keys and values are in the cache.
        num_cached: prompt tokens that a prefix hit saved, at the first time it was scheduled.
        blocks: the KV-cache blocks in order; block i holds tokens i × block_size and on.
        seed: the sampler's seed.
        arrival_time, scheduled_time, …: seconds on the monotonic clock, for the metrics.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = field(default_factory=time.monotonic)

    token_ids: list[int] = field(init=False)
    num_computed: int = field(init=False, default=0)
    num_cached: int | None = field(init=False, default=None)
    blocks: list[int] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    scheduled_time: float | None = field(init=False, default=None)
    first_token_time: float | None = field(init=False, default=None)
    last_token_time: float | None = field(init=False, default=None)
    previous_token_time: float | None = field(init=False, default=None)
    num_preemptions: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are still to compute."""
        return len(self.token_ids) - self.num_computed

    def stop_check(self, token_id: int) -> None:
        """Sets `finish_reason` if `token_id`, the newest token, ends this request."""
        if token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        elif token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
