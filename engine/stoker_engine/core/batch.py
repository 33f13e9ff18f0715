"""What the scheduler hands to the runner: one step's work, as plain facts."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class ScheduledSequence:
    """One request's share of a step.

    Attributes:
        token_ids: the tokens to compute now, in order.
        start: position of the first of them; everything before is in the cache.
        blocks: the request's block table, covering at least ``start + len(token_ids)`` tokens.
        samples: whether the last of `token_ids` is the last known token, so that a new one is sampled.
        seed: of the sampler, which draws by (seed, position) alone.
    """

    request_id: str
    token_ids: list[int]
    start: int
    blocks: list[int]
    samples: bool
    params: SamplingParams
    seed: int

    @property
    def end(self) -> int:
        """Position after the last token computed in this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: sequences in the order they lie in the flat batch, and how many tokens that is."""

    sequences: list[ScheduledSequence]
    num_tokens: int

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that get a new token, in order."""
        return [sequence for sequence in self.sequences if sequence.samples]
