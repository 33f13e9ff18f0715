"""Which layers each stage of a pipeline holds.

Stages hold equally many. What is left over goes, one layer each, to the stages before the last, from the back: the
last one also computes the logits, and the first one embeds (this is vLLM's division).
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
        index: which, from 0.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The layers it holds, of `num_layers`."""
        return pipeline_stages(num_layers, self.count)[self.index]


#: All layers are in one place.
ONE_STAGE: Final = Stage()


@lru_cache(maxsize=1024)
def pipeline_stages(num_layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage, first to last.

    Args:
        num_layers: of the model.
        stages: at least 1, and at most `num_layers`.
    """
    assert 1 <= stages <= num_layers
    sizes = [num_layers // stages] * stages
    for extra in range(num_layers % stages):
        sizes[-2 - extra] += 1
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
