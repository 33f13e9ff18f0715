"""How long a step takes, as steps that have ended tell.

    seconds = fixed + token · n + pair · Σ (2 L n + n²) + decode · d

n tokens of a prompt after L that are in the cache, d sequences that decode. `fixed` is what a step costs that computes
next to nothing: on most processors the reading of the weights. The numbers are fitted to the latest steps by least
squares of relative errors, so that a step of 10 ms counts as much as one of a second, and a few that something held up
(a page that was read, another process) count for little. A processor that becomes slower is noticed by the latest
steps: if most of them took longer than the fit says, prompts are taken to cost as much more. None of the numbers is
negative. What the steps so far leave open is taken to be small, in the order of `_DOUBT`; and of prompts the estimate
holds up to `REACH` times as many tokens as a step has had.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

#: Steps that are remembered, of those with tokens of prompts and of those without.
_REMEMBERED: Final = 32

#: Of them, those with prompts that show whether steps have become slower.
_LATEST: Final = 3

#: Of prompts, a step may have as many times more tokens than any that is remembered.
REACH: Final = 4

#: How much is held against fixed, token, pair and decode, where several explain the same: prompts are the first
#: suspect, since a decode step that is thought too long would let long steps pass.
_DOUBT: Final = (1e-4, 1e-7, 1e-3, 1e-3)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        num_prompt_tokens: of sequences that do not just decode.
        num_pairs: the sum of 2 L n + n², twice the keys that their tokens see.
        num_decodes: tokens of sequences that decode, drafts included.
    """

    num_prompt_tokens: int = 0
    num_pairs: int = 0
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step and of its parts.

    Attributes:
        error: how far the remembered steps are from it: the median relative error. Steps that something held up,
            however many and however long, do not make all others shorter.
        max_prompt_tokens: for more than these in a step it says nothing.
    """

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    decode: float = 0.0
    error: float = 0.0
    max_prompt_tokens: int = 0

    def seconds(self, work: StepWork) -> float:
        """Of a whole step."""
        prompts = self.token * work.num_prompt_tokens + self.pair * work.num_pairs
        return self.fixed + prompts + self.decode * work.num_decodes

    def prompt(self, start: int, num_tokens: int) -> float:
        """Seconds that tokens of a prompt add, after `start` that are in the cache."""
        return self.token * num_tokens + self.pair * (2 * start * num_tokens + num_tokens * num_tokens)

    def prompt_tokens(self, start: int, seconds: float) -> float:
        """How many tokens of a prompt add so many seconds: `prompt` the other way round."""
        if seconds <= 0:
            return 0.0
        linear = self.token + 2 * self.pair * start
        divisor = linear + math.sqrt(linear * linear + 4 * self.pair * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _WithPrompts:
    """A step with prompts. `decodes` is what its decodes alone would have taken, as far as was known then; or 0."""

    work: StepWork
    seconds: float
    decodes: float


class StepCost:
    """Learns from steps what others will take."""

    def __init__(self) -> None:
        self._with_prompts = deque[_WithPrompts](maxlen=_REMEMBERED)
        self._of_decodes = deque[tuple[StepWork, float]](maxlen=_REMEMBERED)
        self._estimate: Estimate | None = None
        self._decodes: Estimate | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0:
            return
        if work.num_prompt_tokens:
            self._with_prompts.append(_WithPrompts(work, seconds, self._alone(work)))
        else:
            self._of_decodes.append((work, seconds))
            self._decodes = None
        self._estimate = None

    @property
    def estimate(self) -> Estimate:
        """By the steps observed so far."""
        if self._estimate is None:
            self._estimate = self._fitted()
        return self._estimate

    def _alone(self, work: StepWork) -> float:
        """What the decodes of a step take, or one of them, by the steps of decodes alone; 0: there were none."""
        if self._decodes is None:
            self._decodes = _fit(list(self._of_decodes))
        return self._decodes.seconds(StepWork(num_decodes=max(1, work.num_decodes)))

    def _fitted(self) -> Estimate:
        """Steps with prompts of a time when decodes took longer, or shorter, are taken to have done so too."""
        steps = list(self._of_decodes)
        for step in self._with_prompts:
            alone = self._alone(step.work)
            scale = alone / step.decodes if step.decodes and alone else 1.0
            steps.append((step.work, step.seconds * scale))
        fit = _fit(steps)
        slower = self._slower(fit)
        return replace(fit, token=slower * fit.token, pair=slower * fit.pair)

    def _slower(self, fit: Estimate) -> float:
        """How many times longer than they should the latest steps took, of which one may be a mishap."""
        latest = list(self._with_prompts)[-_LATEST:]
        expected = ((step, fit.seconds(step.work)) for step in latest)
        times = sorted(step.seconds / seconds for step, seconds in expected if seconds > 0)
        return max(1.0, times[len(times) // 2]) if len(times) == _LATEST else 1.0


def _fit(steps: list[tuple[StepWork, float]]) -> Estimate:
    """By what steps took, in seconds."""
    if not steps:
        return Estimate()
    rows = [
        (1 / seconds, work.num_prompt_tokens / seconds, work.num_pairs / seconds, work.num_decodes / seconds)
        for work, seconds in steps
    ]
    scales = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    rows = [(r[0] / scales[0], r[1] / scales[1], r[2] / scales[2], r[3] / scales[3]) for r in rows]
    values = _least_squares(rows)
    errors = [abs(sum(v * x for v, x in zip(values, row, strict=True)) - 1) for row in rows]
    fixed, token, pair, decode = (value / scale for value, scale in zip(values, scales, strict=True))
    max_prompt_tokens = REACH * max(work.num_prompt_tokens for work, _ in steps)
    return Estimate(fixed, token, pair, decode, median(errors), max_prompt_tokens)


def _least_squares(rows: list[tuple[float, float, float, float]]) -> list[float]:
    """The x of which none is negative and |rows · x - 1|² least, `_DOUBT` added: the most negative one is left out
    until there is none."""
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
    sums = [sum(row[i] for row in rows) for i in range(4)]
    free_terms = [0, 1, 2, 3]
    while True:
        matrix = [[gram[i][j] + (_DOUBT[i] if i == j else 0.0) for j in free_terms] + [sums[i]] for i in free_terms]
        solved = dict(zip(free_terms, _solve(matrix), strict=True))
        worst = min(free_terms, key=lambda i: solved[i])
        if solved[worst] >= 0 or len(free_terms) == 1:
            return [max(0.0, solved.get(i, 0.0)) for i in range(4)]
        free_terms.remove(worst)


def _solve(matrix: list[list[float]]) -> list[float]:
    """Of a positive definite matrix and, in its last column, the right-hand side."""
    size = len(matrix)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size + 1):
                matrix[k][j] -= factor * matrix[i][j]
    solved = [0.0] * size
    for i in reversed(range(size)):
        known_sum = sum(matrix[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (matrix[i][size] - known_sum) / matrix[i][i]
    return solved
