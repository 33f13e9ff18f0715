"""Estimates how long a step takes, from the durations of previous steps.

    seconds = fixed + token · Σ n + pair · Σ (2 L n + n²) + decode · d

n is the number of a prompt's tokens after L tokens in the cache, d the number of decoded tokens. `fixed` is the
duration of a step with almost no work: on most processors, the time to read the weights. The coefficients are fitted to
the latest steps by least squares of relative errors, so that a step of 10 ms counts as much as one of a second, and a
few outliers (a page fault, another process) count little. The latest steps with prompts detect a processor that becomes
slower: if most of them took longer than the fit predicts, the cost of prompts is scaled up by their median ratio. All
coefficients are non-negative. Coefficients that the observed steps do not determine are assumed to be small, by the
weights in `_DOUBT`. The estimate is valid up to `REACH` times the maximum number of prompt tokens in a remembered step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

#: Number of steps remembered, separately with and without prompt tokens.
_REMEMBERED: Final = 32

#: Number of latest steps with prompts that detect a slowdown.
_LATEST: Final = 3

#: Factor between the maximum number of prompt tokens in a remembered step and in an estimated one.
REACH: Final = 4

#: Regularization of fixed, token, pair and decode, for steps that several coefficients explain. `token` gets the least:
#: an overestimated decode time would permit steps that are too long.
_DOUBT: Final = (1e-4, 1e-7, 1e-3, 1e-3)


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step.

    Attributes:
        num_prompt_tokens: tokens of sequences that compute more than one token.
        num_pairs: sum of 2 L n + n², which is about twice the number of (query, key) pairs.
        num_decodes: all other tokens, including drafts.
    """

    num_prompt_tokens: int = 0
    num_pairs: int = 0
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Coefficients of the estimated duration, in seconds.

    Attributes:
        error: median relative error over the remembered steps, so that outliers do not shorten all other steps.
        max_prompt_tokens: maximum number of prompt tokens in a step for which the estimate is valid.
    """

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    decode: float = 0.0
    error: float = 0.0
    max_prompt_tokens: int = 0

    def seconds(self, work: StepWork) -> float:
        """Return the estimated duration of a step, in seconds."""
        prompts = self.token * work.num_prompt_tokens + self.pair * work.num_pairs
        return self.fixed + prompts + self.decode * work.num_decodes

    def prompt(self, start: int, num_tokens: int) -> float:
        """Return the seconds that `num_tokens` prompt tokens add after `start` tokens in the cache."""
        return self.token * num_tokens + self.pair * (2 * start * num_tokens + num_tokens * num_tokens)

    def prompt_tokens(self, start: int, seconds: float) -> float:
        """Return how many prompt tokens take `seconds`: the inverse of `prompt`."""
        if seconds <= 0:
            return 0.0
        linear = self.token + 2 * self.pair * start
        divisor = linear + math.sqrt(linear * linear + 4 * self.pair * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _WithPrompts:
    """A step with prompts. `decodes`: seconds of its decodes (at least one) alone, estimated at the time of the step;
    0 if unknown.
    """

    work: StepWork
    seconds: float
    decodes: float


class StepCost:
    """Learns the duration of steps from observed ones."""

    def __init__(self) -> None:
        self._with_prompts = deque[_WithPrompts](maxlen=_REMEMBERED)
        self._of_decodes = deque[tuple[StepWork, float]](maxlen=_REMEMBERED)
        self._estimate: Estimate | None = None
        self._decodes: Estimate | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record the duration of a step, in seconds; 0 (not measured) is ignored."""
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
        """The estimate from the remembered steps."""
        if self._estimate is None:
            self._estimate = self._fitted()
        return self._estimate

    def _alone(self, work: StepWork) -> float:
        """Estimate the seconds of a step's decodes (at least one) from steps without prompts; 0: none observed."""
        if self._decodes is None:
            self._decodes = _fit(list(self._of_decodes))
        return self._decodes.seconds(StepWork(num_decodes=max(1, work.num_decodes)))

    def _fitted(self) -> Estimate:
        """Fit the remembered steps. Durations with prompts are scaled by the change of decode times since each step."""
        steps = list(self._of_decodes)
        for step in self._with_prompts:
            alone = self._alone(step.work)
            scale = alone / step.decodes if step.decodes and alone else 1.0
            steps.append((step.work, step.seconds * scale))
        fit = _fit(steps)
        slower = self._slower(fit)
        return replace(fit, token=slower * fit.token, pair=slower * fit.pair)

    def _slower(self, fit: Estimate) -> float:
        """Return the median slowdown of the `_LATEST` latest steps with prompts against the fit, at least 1; 1 if there
        are fewer such steps."""
        latest = list(self._with_prompts)[-_LATEST:]
        expected = ((step, fit.seconds(step.work)) for step in latest)
        times = sorted(step.seconds / seconds for step, seconds in expected if seconds > 0)
        return max(1.0, times[len(times) // 2]) if len(times) == _LATEST else 1.0


def _fit(steps: list[tuple[StepWork, float]]) -> Estimate:
    """Fit (work, seconds) of steps."""
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
    """Minimize |rows · x - 1|² plus the `_DOUBT` terms with x ≥ 0, by removing the most negative term repeatedly."""
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
    """Solve a positive definite system whose last column is the right-hand side."""
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
