"""The ways in which a replica's accelerators can share a model, each with its verdict.

Choosing the right one (the rule of thumb of vLLM's documentation, and of most people who run it):

    1.  the fewest accelerators that hold a copy    → tensor, and pipeline where tensor alone cannot
    2.  the rest make further copies                → data = accelerators ÷ (tensor × pipeline)

More copies serve more requests; more accelerators a copy leave each more memory for its KV cache, that is, for longer
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stoker_engine.contract.weight_sizes import Sharding
from stoker_operator.api.v1alpha1.parallelism import Sizes
from stoker_operator.plan.estimate import Bench, Estimate, Problem, could_hold, estimate

#: Accelerators that nodes come with.
NODE_COUNTS: Final = (1, 2, 4, 8)
#: The most that is searched for a model that is too large.
_MOST: Final = 64


@dataclass(frozen=True)
class Option:
    """One way.

    Attributes:
        sizes: tensor, pipeline, data.
        estimate: a copy in memory; None where nothing is known of the model.
        problem: why it cannot be; None: it can.
    """

    sizes: Sizes
    estimate: Estimate | None = None
    problem: Problem | None = None

    @property
    def copy_size(self) -> int:
        """Accelerators of one copy."""
        return self.sizes.tensor * self.sizes.pipeline


@dataclass(frozen=True)
class Layout:
    """What the options share.

    Attributes:
        count: accelerators of a pod.
        nodes: pods of a replica.
        bench: what a copy is measured on; None where the model's shape is not known.
        spread_experts: whether whole experts are spread over all copies' accelerators.
    """

    count: int
    nodes: int
    bench: Bench | None
    spread_experts: bool = False

    @property
    def gpus(self) -> int:
        """Accelerators of a replica."""
        return self.count * self.nodes


def judge(layout: Layout, sizes: Sizes) -> Option:
    """The verdict on one way."""
    problem = _structure(layout, sizes)
    if layout.bench is None or (problem and problem.reason != "TensorSpansNodes"):
        return Option(sizes, problem=problem)
    experts = sizes.tensor * sizes.data if layout.spread_experts else 1
    found, shortage = estimate(layout.bench, Sharding(sizes.tensor, sizes.pipeline, experts))
    return Option(sizes, found, problem or shortage)


def options(layout: Layout, pipeline: int | None = None) -> tuple[Option, ...]:
    """All ways that use every accelerator, the widest copy first.

    Pipelines are among them where one is asked for, where a replica spans nodes, or where no copy fits without and one
    may with.
    """
    if pipeline is not None:
        return _with(layout, (pipeline,))
    found = _with(layout, sorted({1, layout.nodes}))
    if any(option.problem is None for option in found) or layout.bench is None:
        return found
    if not could_hold(layout.bench, layout.gpus):
        return found
    return found + _with(layout, (size for size in range(2, layout.gpus + 1) if size != layout.nodes))


def recommended(found: Sequence[Option]) -> Option | None:
    """The one to choose: the fewest accelerators a copy, rather split by tensor than by pipeline. None where none is
    possible, or where nothing is known of the model."""
    possible = [option for option in found if option.problem is None and option.estimate is not None]
    return min(possible, key=lambda option: (option.copy_size, option.sizes.pipeline), default=None)


def smallest(layout: Layout) -> Option | None:
    """The smallest machine of the same accelerators that holds one copy; None where none is known to."""
    for gpus in (*NODE_COUNTS, *range(2 * max(NODE_COUNTS), _MOST + 1, max(NODE_COUNTS))):
        if layout.bench is not None and not could_hold(layout.bench, gpus):
            continue
        alone = replace(layout, count=min(gpus, max(NODE_COUNTS)), nodes=max(1, gpus // max(NODE_COUNTS)))
        ways = (Sizes(tensor, gpus // tensor, 1) for tensor in range(alone.count, 0, -1) if gpus % tensor == 0)
        widest = next((sizes for sizes in ways if _structure(alone, sizes) is None), None)
        found = None if widest is None else judge(alone, widest)
        if found is not None and found.problem is None:
            return found
    return None


def _with(layout: Layout, pipelines: Iterable[int]) -> tuple[Option, ...]:
    ways = []
    for pipeline in pipelines:
        if layout.gpus % pipeline == 0:
            rest = layout.gpus // pipeline
            tensors = (size for size in range(rest, 0, -1) if rest % size == 0 and size <= layout.count)
            ways += [judge(layout, Sizes(tensor, pipeline, rest // tensor)) for tensor in tensors]
    return tuple(ways)


def _structure(layout: Layout, sizes: Sizes) -> Problem | None:
    """What speaks against a way whatever the memory."""
    if sizes.tensor > layout.count:
        message = f"tensor {sizes.tensor} spans nodes, each of which has {layout.count}"
        return Problem("TensorSpansNodes", message)
    if layout.bench is None:
        return None
    shape = layout.bench.shape
    if shape.heads % sizes.tensor:
        message = f"tensor {sizes.tensor} does not divide the model's {shape.heads} attention heads"
        return Problem("HeadsNotDivisible", message)
    kv_heads = shape.kv_heads
    if kv_heads and kv_heads % sizes.tensor and sizes.tensor % kv_heads:
        message = f"tensor {sizes.tensor} neither divides the model's {kv_heads} key-value heads nor is their multiple"
        return Problem("KVHeadsNotDivisible", message)
    layers = shape.config.num_hidden_layers
    if sizes.pipeline > layers:
        return Problem("TooFewLayers", f"pipeline {sizes.pipeline} is more than the model's {layers} layers")
    return None
