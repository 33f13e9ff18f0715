"""Beam search: selects the beams that continue and those that are finished, and decides when to stop.

The rules are those of Hugging Face transformers. Each running beam offers its most likely next tokens. Of all offers,
the best max(2, 1 + number of end tokens) × width by summed log-probability are processed in order:

    ends (end token, or maximum length)   if among the best `width`: a finished beam; else dropped
    continues                             the best `width` of these are the next running beams

The score of a finished beam is summed log-probability ÷ generated tokens ** length_penalty; the best `width` are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Offer of a running beam: (token, its log-probability), best first.
Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class FinishedBeam:
    """A finished beam.

    Attributes:
        token_ids: generated tokens, including the end token.
        ended: whether an end token finished it; else the maximum length did.
    """

    score: float
    cumulative_logprob: float
    token_ids: list[int]
    ended: bool


@dataclass(frozen=True)
class NextBeam:
    """A running beam of the next step: the beam with index `parent`, continued by `token_id`."""

    parent: int
    token_id: int


@dataclass
class BeamSearch:
    """The state of one request's search.

    Attributes:
        width: maximum number of running beams, and of finished ones.
        max_tokens: number of generated tokens at which every beam ends.
        end_tokens: tokens that end a beam.
        length_penalty, early_stopping: see `core.sampling_params.BeamSearchParams`.
        scores: summed log-probability of each running beam.
        finished: the finished beams, best first.
    """

    width: int
    max_tokens: int
    end_tokens: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[FinishedBeam] = field(default_factory=list)

    @property
    def num_candidates(self) -> int:
        """Number of next tokens each beam must offer: enough to continue even if all of the best ones end."""
        return max(2, 1 + len(self.end_tokens)) * self.width

    def advance(self, offers: Sequence[Candidates], outputs: Sequence[Sequence[int]]) -> list[NextBeam]:
        """Advance the search by one step.

        Args:
            offers: candidates of each running beam.
            outputs: tokens generated so far by each running beam.

        Returns:
            The next running beams, best first. Empty: the search is over, see `finished`.
        """
        width, length = self.width, len(outputs[0]) + 1
        merged = [
            (self.scores[beam] + logprob, beam, token)
            for beam, candidates in enumerate(offers)
            for token, logprob in candidates
        ]
        merged.sort(key=lambda offer: -offer[0])
        going_on: list[tuple[float, NextBeam]] = []
        for rank, (score, beam, token) in enumerate(merged[: self.num_candidates]):
            ended = token in self.end_tokens
            if not ended and length < self.max_tokens:
                going_on.append((score, NextBeam(beam, token)))
            elif rank < width:
                final: float = score / length**self.length_penalty
                self.finished.append(FinishedBeam(final, score, [*outputs[beam], token], ended))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        del going_on[width:]
        self.scores = [score for score, _ in going_on]
        return [] if self._is_over(length) else [beam for _, beam in going_on]

    def _is_over(self, length: int) -> bool:
        if not self.scores:
            return True
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        penalty = self.length_penalty
        if self.early_stopping == "never" and penalty > 0:
            length = self.max_tokens
        best: float = self.scores[0] / length**penalty
        return best <= self.finished[-1].score
