"""Beam search: which beams go on, which are finished, and when to stop. Pure; transformers' rules, so that its beams
come out.

Each running beam offers its likeliest next tokens. Of all offers the best (1 + end tokens) × width by summed
log-probability are looked at, in order:

    ends (end token, or the length is reached)   among the best `width`: a finished beam; else dropped
    goes on                                      the best `width` of them are the next running beams

A finished beam scores  summed log-probability ÷ generated tokens ** length_penalty;  the best `width` are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

#: One running beam's offer: (token, its log-probability), best first.
Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class FinishedBeam:
    """A beam that goes no further.

    Attributes:
        token_ids: what it generated, the end token included.
        ended: by an end token; else by the length.
    """

    score: float
    cumulative_logprob: float
    token_ids: list[int]
    ended: bool


@dataclass(frozen=True)
class NextBeam:
    """A beam of the next step: running beam `parent`, continued by `token_id`."""

    parent: int
    token_id: int


@dataclass
class BeamSearch:
    """The state of one request's search.

    Attributes:
        width: beams kept at each step.
        max_tokens: generated tokens at which every beam ends.
        end_tokens: tokens that end a beam.
        length_penalty, early_stopping: see `core.sampling_params.BeamSearchParams`.
        scores: summed log-probability of each running beam.
        finished: best first.
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
        """How many next tokens each beam must offer: enough to go on even if all of the best ones end."""
        return max(2, 1 + len(self.end_tokens)) * self.width

    def advance(self, offers: Sequence[Candidates], outputs: Sequence[Sequence[int]]) -> list[NextBeam]:
        """Takes one step.

        Args:
            offers: of each running beam.
            outputs: what each running beam has generated so far.

        Returns:
            The next running beams, best first. None: the search is over, see `finished`.
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
