"""Limits how many tokens a step may compute, and how many of them may belong to prompts: to sequences with more than
one uncomputed token.

    no sequence decodes │ prompts ─────────────────────────────────── max_num_batched_tokens │
    sequences decode    │ prompts, limited by time or by number of tokens │ decodes, one token each │

Each decoding sequence waits until the whole step ends, so the prompt tokens beside decodes determine the inter-token
latency (stall-free batching, Agrawal et al., 2024). Their limit is a time, which `step_cost` converts into a number of
tokens: as many as fit, at least a block for the first prompt. A part of a prompt is rounded down to a multiple of a
quarter of the largest power of two in it, so that shapes recur. Or the limit is a number of tokens
(``--long-prefill-token-threshold``), at least one, so prompts do not starve unless decodes use up
`max_num_batched_tokens`. Prompts use the limit in queue order.

The stages of a pipeline work on several steps at a time, each with other sequences. Decoding sequences are distributed
over these steps: if all were in one step, the other stages would idle. Between two of its tokens, a sequence then waits
for all these steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_engine.core.request import Sequence
from stoker_engine.sched.step_cost import Estimate, StepCost, StepWork

#: Default limit for a step with prompts, as a multiple of the duration of its decodes alone.
DECODE_STEPS: Final = 4

#: Margin below the limit, in multiples of the estimate's median error, so that most steps stay within it.
_ERRORS: Final = 2


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of the prompts in a step while sequences decode.

    Attributes:
        tokens: maximum number of prompt tokens, regardless of time; 0: all that decodes leave; None: limited by time.
        seconds: maximum inter-token latency; None: `DECODE_STEPS` times the latency without prompts.
        chunked: whether a prompt may take several steps; else prompts are never split, and these limits do not apply.
        block: tokens per block.
    """

    tokens: int | None = None
    seconds: float | None = None
    chunked: bool = True
    block: int = 16


class StepBudget:
    """Remaining token budget of one step.

    Args:
        max_tokens: maximum number of tokens in the step.
        cost: estimate of steps' durations; None: time is not limited. Evaluated when the first prompt gets its share.
        num_batches: number of steps that decoding sequences are distributed over.
        num_free: number of these steps that are not in flight, including this one.

    Attributes:
        tokens: remaining tokens.
        prompts: remaining tokens that prompts may use.
    """

    def __init__(
        self,
        running: Iterable[Sequence],
        max_tokens: int,
        limits: PromptLimits,
        cost: StepCost | None = None,
        num_batches: int = 1,
        num_free: int = 1,
    ) -> None:
        self.tokens = self.prompts = self._decodes = max_tokens
        self._limits = limits
        self._cost: StepCost | None = None  # set if prompts are limited by time
        self._seconds: float | None = None  # remaining time for prompts; None until the first prompt's share
        self._num_batches = num_batches
        if num_batches == 1:
            num_decoding = num_decodes = sum(sequence.num_uncomputed == 1 for sequence in running)
        else:
            decoding = [sequence for sequence in running if sequence.num_known - sequence.num_launched <= 1]
            num_decoding = len(decoding)
            ready = sum(sequence.num_uncomputed == 1 for sequence in decoding)
            num_decodes = self._decodes = min(-(-num_decoding // num_batches), -(-ready // max(1, num_free)))
        self._num_decodes = num_decodes
        if num_decoding and limits.chunked:
            self.prompts = max(1, min(limits.tokens or max_tokens, max_tokens - num_decodes))
            self._cost = cost if limits.tokens is None else None

    def decode(self, num_uncomputed: int) -> int:
        """Return `num_uncomputed` (0 or 1) if a decoding sequence may compute its token in this step, else 0."""
        if num_uncomputed and not self._decodes:
            return 0
        self._decodes -= num_uncomputed
        return num_uncomputed

    def share(self, num_uncomputed: int, start: int) -> int:
        """Return how many of `num_uncomputed` tokens a sequence with `start` computed tokens may compute; 0: it
        waits."""
        num_tokens = min(num_uncomputed, self.prompts if num_uncomputed > 1 else self.tokens)
        if num_uncomputed > 1 and self._cost is not None:
            num_tokens = self._in_time(num_tokens, num_uncomputed, start, self._cost.estimate)
        return num_tokens if self._limits.chunked or num_tokens == num_uncomputed else 0

    def spend(self, num_uncomputed: int, num_tokens: int, start: int) -> None:
        """Subtract `num_tokens` of a sequence's `num_uncomputed` tokens from the budget, and their time, which depends
        on the number of computed tokens, `start`."""
        self.tokens -= num_tokens
        if num_uncomputed > 1:
            self.prompts -= num_tokens
            if self._cost is not None and self._seconds is not None:
                estimate = self._cost.estimate
                self._seconds -= estimate.prompt(start, num_tokens)
                if estimate.prompt_tokens(0, self._seconds) < 1:
                    self.prompts = 0
        if self.prompts > self.tokens:
            self.prompts = self.tokens

    def _in_time(self, max_tokens: int, num_uncomputed: int, start: int, estimate: Estimate) -> int:
        """Return how many tokens, at most `max_tokens`, fit the remaining time; at least a block for the first
        prompt."""
        block, is_first = self._limits.block, self._seconds is None
        if self._seconds is None:
            alone = estimate.seconds(StepWork(num_decodes=self._num_decodes))
            limit = self._limits.seconds
            whole = DECODE_STEPS * alone if limit is None else limit / self._num_batches
            self._seconds = whole / (1 + _ERRORS * estimate.error) - alone
            max_tokens = self.prompts = min(self.prompts, max(block, estimate.max_prompt_tokens))
        fitting = min(max_tokens, num_uncomputed, estimate.prompt_tokens(start, self._seconds))
        if is_first and fitting < block:
            return min(max_tokens, num_uncomputed, block)
        if fitting == num_uncomputed:
            return num_uncomputed
        fits = int(fitting)
        unit = max(1, (1 << fits.bit_length()) >> 3)
        return fits // unit * unit
