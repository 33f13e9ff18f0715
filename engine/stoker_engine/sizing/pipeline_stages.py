"""Layers of each pipeline stage.

Stages hold the same number of layers. Remaining layers go one each to the stages before the last, from back to front,
because the last stage also computes the logits and the first one the embedding (as in vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        index: index of the stage, from 0.
        count: number of stages.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the stage computes the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of the stage's layers in a model of `num_layers`."""
        return pipeline_stages(num_layers, self.count)[self.index]


#: No pipeline parallelism.
ONE_STAGE: Final = Stage()


@lru_cache(maxsize=1024)
def pipeline_stages(num_layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, first to last.

    Args:
        stages: number of stages, from 1 to `num_layers`.
    """
    assert 1 <= stages <= num_layers
    sizes = [num_layers // stages] * stages
    for extra in range(num_layers % stages):
        sizes[-2 - extra] += 1
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
