"""How many tokens a step may compute, and how many of them are for prompts.

    nobody decodes    │ prompts ─────────────────────────────────── max_num_batched_tokens │
    others decode     │ prompts, as many as their time or their number allows │ decodes, one token each │

A step lasts as long as its tokens take, and every sequence that decodes waits for it: what prompts get beside decodes
bounds the time between two tokens of a stream (stall-free batching, Agrawal et al., 2024). That is a time, by which
`step_cost` says how many tokens: as many as fit, at least a block, and in even steps, a quarter of a power of two, so
that shapes recur. Or it is a number of tokens (``--long-prefill-token-threshold``). Prompts share
their part in line, and keep at least one token of a step from those that decode behind them in line, so none starves.

The stages of a pipeline work on several steps at a time, each of other sequences. Those that decode are dealt among
them: were all in one step, the other stages would wait. A stream then waits for all those steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_engine.core.request import Sequence
from stoker_engine.sched.step_cost import Estimate, StepCost, StepWork

#: A step with prompts takes at most so many times what its decodes alone take, unless told otherwise.
DECODE_STEPS: Final = 4

#: How many times the usual error of an estimate is left free, so that most steps are within their time.
_ERRORS: Final = 2


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What bounds the prompts of a step while others decode.

    Attributes:
        tokens: most of them, whatever time they take; 0: what decodes leave; None: time decides.
        seconds: most between two tokens of a stream; None: `DECODE_STEPS` times what it is without prompts.
        chunked: whether a prompt may take several steps; else it is never cut, and nothing is kept from it.
        block: tokens of a block.
    """

    tokens: int | None = None
    seconds: float | None = None
    chunked: bool = True
    block: int = 16


class StepBudget:
    """What is left of one step.

    Args:
        running: the sequences that hold blocks.
        max_tokens: most tokens of the step.
        cost: what steps take; None: it is of no interest. Asked once a prompt is.
        num_batches: steps that those who decode are dealt among.
        num_free: of them, those that are not in flight, this one included.

    Attributes:
        tokens: tokens left.
        prompts: of them, how many prompts may take.
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
        self._cost: StepCost | None = None  # where time is what bounds prompts
        self._seconds: float | None = None  # left for prompts, once the first has asked
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
        """Whether a sequence that wants one token, or none, may compute it in this step."""
        if num_uncomputed and not self._decodes:
            return 0
        self._decodes -= num_uncomputed
        return num_uncomputed

    def share(self, num_uncomputed: int, start: int) -> int:
        """How many of `num_uncomputed` tokens a sequence may compute that has computed `start`; 0: it must wait."""
        num_tokens = min(num_uncomputed, self.prompts if num_uncomputed > 1 else self.tokens)
        if num_uncomputed > 1 and self._cost is not None:
            num_tokens = self._in_time(num_tokens, num_uncomputed, start, self._cost.estimate)
        return num_tokens if self._limits.chunked or num_tokens == num_uncomputed else 0

    def spend(self, num_uncomputed: int, num_tokens: int, start: int) -> None:
        """Spends `num_tokens` of the `num_uncomputed` ones."""
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
        """How many tokens, at most `max_tokens`, fit the time that is left; the first prompt gets at least a block."""
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
