"""How many tokens a step may compute, and how many of them are for prompts.

    nobody decodes    │ prompts ─────────────────────────────────── max_num_batched_tokens │
    others decode     │ prompts ──── long_prefill_token_threshold │ decodes, one token each │

A step lasts as long as its tokens take, and every sequence that decodes waits for it: what prompts get beside decodes
bounds the time between two tokens of a stream (stall-free batching, Agrawal et al., 2024). Prompts share that part in
line, and keep at least one token of a step from those that decode behind them in line, so none starves.

The stages of a pipeline work on several steps at a time, each of other sequences. Those that decode are dealt among
them: were all in one step, the other stages would wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker_engine.core.request import Sequence


class StepBudget:
    """What is left of one step.

    Args:
        running: the sequences that hold blocks.
        max_tokens: most tokens of the step.
        prompt_tokens: most tokens of prompts while others decode; 0: what decodes leave.
        chunked: whether a prompt may take several steps; else it is never cut, and nothing is kept from it.
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
        prompt_tokens: int,
        chunked: bool,
        num_batches: int = 1,
        num_free: int = 1,
    ) -> None:
        self.tokens = self.prompts = self._decodes = max_tokens
        self._chunked = chunked
        if num_batches == 1:
            num_decoding = num_decodes = sum(sequence.num_uncomputed == 1 for sequence in running)
        else:
            decoding = [sequence for sequence in running if sequence.num_known - sequence.num_launched <= 1]
            num_decoding = len(decoding)
            ready = sum(sequence.num_uncomputed == 1 for sequence in decoding)
            num_decodes = self._decodes = min(-(-num_decoding // num_batches), -(-ready // max(1, num_free)))
        if num_decoding and chunked:
            self.prompts = max(1, min(prompt_tokens or max_tokens, max_tokens - num_decodes))

    def decode(self, wanted: int) -> int:
        """Whether a sequence that wants one token, or none, may compute it in this step."""
        if wanted and not self._decodes:
            return 0
        self._decodes -= wanted
        return wanted

    def share(self, wanted: int) -> int:
        """How many of `wanted` tokens a sequence may compute; 0: it must wait."""
        num_tokens = min(wanted, self.prompts if wanted > 1 else self.tokens)
        return num_tokens if self._chunked or num_tokens == wanted else 0

    def take(self, wanted: int, num_tokens: int) -> None:
        """Spends `num_tokens` of the `wanted` ones."""
        self.tokens -= num_tokens
        if wanted > 1:
            self.prompts -= num_tokens
        if self.prompts > self.tokens:
            self.prompts = self.tokens
