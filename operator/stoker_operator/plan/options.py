"""The ways in which a replica's accelerators can share a model, each with its verdict.

What is recommended is what serves, not what barely fits:

    1.  sequences of the length in the spec, or else of the model's own
    2.  so many of them at once as the floor requires, in each engine
    3.  the most engines: the fewest accelerators an engine, rather split by tensor than by pipeline

Where no way reaches length and floor, the one that comes nearest is recommended, length first. More accelerators a
engine leave each more memory for its KV cache; more engines serve more requests.

Engines that share nothing are better pods of their own (``count`` of one engine, and ``replicas``): one that fails
takes no other with it, smaller pods find room on more nodes, and replicas scale in finer steps. Engines of a mixture
whose experts are dealt over all of them work in step, and so stay in one pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stoker_engine.contract.engine_args import ENGINES_SHARE_NO_EXPERTS
from stoker_engine.sizing.sharding import heads_problem, objection
from stoker_engine.sizing.weight_sizes import Sharding
from stoker_operator.api.v1alpha1.parallelism import Sizes
from stoker_operator.plan.estimate import Bench, Estimate, Problem, could_hold, estimate
from stoker_operator.plan.foreign_sharding import Split, uneven

#: Accelerators that nodes come with.
NODE_COUNTS: Final = (1, 2, 4, 8)
#: The most that is searched for a model that is too large.
_MAX_GPUS: Final = 64
#: Sequences that an engine should hold at once, where the spec does not state how many.
MIN_CONCURRENCY: Final = 4


@dataclass(frozen=True)
class Option:
    """One way.

    Attributes:
        sizes: tensor, pipeline, data.
        estimate: an engine in memory; None where nothing is known of the model.
        problem: why it cannot be; None: it can.
        whole_experts: experts are dealt over tensor × data accelerators, instead of each being split.
        reach: how far an engine comes towards what is wanted: the length, and the sequences of it at once. What is not
            known is taken to be enough.
        serves: that is all that is wanted.
    """

    sizes: Sizes
    estimate: Estimate | None = None
    problem: Problem | None = None
    whole_experts: bool = False
    reach: tuple[int, int] = (0, 0)
    serves: bool = False

    @property
    def copy_size(self) -> int:
        """Accelerators of one engine."""
        return self.sizes.tensor * self.sizes.pipeline

    @property
    def expert(self) -> int:
        """What ``spec.parallelism.expert`` says of it; 1: nothing."""
        return self.sizes.tensor * self.sizes.data if self.whole_experts else 1

    @property
    def way(self) -> tuple[Sizes, int]:
        """What identifies it among other ways."""
        return self.sizes, self.expert


@dataclass(frozen=True)
class Advice:
    """What to write for a way that is recommended.

    Attributes:
        option: the way.
        count: accelerators of a pod.
        nodes: pods of a replica.
        replicas: how many replicas.
        sizes: tensor, pipeline and data of each.
        reason: why this one.
    """

    option: Option
    count: int
    nodes: int
    replicas: int
    sizes: Sizes
    reason: str

    @property
    def apart(self) -> bool:
        """Whether engines that would share a pod are better pods of their own."""
        return self.sizes != self.option.sizes


@dataclass(frozen=True)
class ParallelLayout:
    """What the options share.

    Attributes:
        count: accelerators of a pod.
        nodes: pods of a replica.
        bench: what an engine is measured on; None where the model's shape is not known.
        joint_experts: the engines of a mixture share its experts: each device of all engines holds a part of them.
        whole_experts: whether whole experts are dealt, instead of each being split.
        can_deal_experts: the runtime could deal whole experts, where splitting each does not come out even.
        min_concurrency: sequences that an engine should hold at once.
        max_per_pod: accelerators that can be used together; None: any number.
        divisible: pods may have fewer accelerators than these.
        is_stoker: our engine runs, which divides models by rules of its own.
        counted: the spec counts the devices, as accelerators; those of a CPU are ranks, which share a pod.
    """

    count: int
    nodes: int
    bench: Bench | None
    joint_experts: bool = False
    whole_experts: bool = False
    can_deal_experts: bool = False
    min_concurrency: int = MIN_CONCURRENCY
    max_per_pod: int | None = None
    divisible: bool = True
    is_stoker: bool = False
    counted: bool = True

    @property
    def gpus(self) -> int:
        """Accelerators of a replica."""
        return self.count * self.nodes

    def sharding(self, sizes: Sizes) -> Sharding:
        """How the devices of an engine share the model."""
        experts = 1
        if self.joint_experts:
            experts = sizes.tensor * sizes.data
        elif self.whole_experts:
            experts = sizes.tensor
        return Sharding(sizes.tensor, sizes.pipeline, experts)


def evaluate_option(layout: ParallelLayout, sizes: Sizes) -> Option:
    """The verdict on one way."""
    whole_experts = layout.whole_experts
    problem = _structure(layout, sizes)
    if layout.bench is None or (problem and problem.reason != "TensorSpansNodes"):
        return Option(sizes, problem=problem, whole_experts=whole_experts)
    found, shortage = estimate(layout.bench, layout.sharding(sizes))
    target = (layout.bench.wanted_len, layout.min_concurrency)
    held = found.max_model_len, found.max_concurrency
    reach = tuple(limit if each is None else min(each, limit) for each, limit in zip(held, target, strict=True))
    possible = problem is None and shortage is None
    return Option(sizes, found, problem or shortage, whole_experts, (reach[0], reach[1]), possible and reach == target)


def options(layout: ParallelLayout, pipeline: int | None = None) -> tuple[Option, ...]:
    """All ways that use every accelerator, the widest engine first.

    Pipelines are among them where the spec has one, where a replica spans nodes, or where no engine fits without and
    one may with.
    """
    if pipeline is not None:
        return _options_with(layout, (pipeline,))
    found = _options_with(layout, sorted({1, layout.nodes}))
    if any(option.problem is None for option in found) or layout.bench is None:
        return found
    if not could_hold(layout.bench, layout.gpus):
        return found
    return found + _options_with(layout, (size for size in range(2, layout.gpus + 1) if size != layout.nodes))


def recommended(found: Sequence[Option]) -> Option | None:
    """The one to choose, by the rule above. None where none is possible, or where nothing is known of the model."""
    possible = [option for option in found if option.problem is None and option.estimate is not None]
    return max(possible, key=lambda it: (*it.reach, -it.copy_size, -it.sizes.pipeline), default=None)


def advise(layout: ParallelLayout, found: Sequence[Option], replicas: int) -> Advice | None:
    """What to write for the way that is recommended among `found`, where the spec has `replicas`."""
    best = recommended(found)
    if best is None:
        return None
    sizes, joint = best.sizes, layout.joint_experts or best.whole_experts
    if not layout.counted:
        return Advice(best, 1, 1, replicas, sizes, _reason_text(layout, best))
    nodes = -(-best.copy_size // layout.count)
    if sizes.data == 1 or joint or not layout.divisible or best.copy_size % nodes:
        return Advice(best, layout.count, layout.nodes, replicas, sizes, _reason_text(layout, best))
    alone = sizes._replace(data=1)
    count, replicas = best.copy_size // nodes, max(replicas, 1) * sizes.data
    reason = f"{_reason_text(layout, best)}; better as hardware.count {count}, replicas {replicas}: one engine a pod"
    return Advice(best, count, nodes, replicas, alone, reason)


def _reason_text(layout: ParallelLayout, best: Option) -> str:
    assert layout.bench is not None and best.estimate is not None
    wanted_len = layout.bench.wanted_len
    if layout.bench.memory_bytes is None:
        return "the fewest accelerators an engine, whose memory is not known"
    if best.serves:
        return f"the most engines that hold {layout.min_concurrency} sequences of {wanted_len:,} tokens each"
    length, at_once = best.reach
    return f"comes nearest to {layout.min_concurrency} sequences of {wanted_len:,} tokens: {at_once} of {length:,}"


def smallest(layout: ParallelLayout, *, serving: bool = False) -> Option | None:
    """The smallest machine of the same accelerators that holds one engine, or also serves as is wanted; None where none
    is known to."""
    for gpus in (*NODE_COUNTS, *range(2 * max(NODE_COUNTS), _MAX_GPUS + 1, max(NODE_COUNTS))):
        if layout.bench is not None and not could_hold(layout.bench, gpus):
            continue
        alone = replace(layout, count=min(gpus, max(NODE_COUNTS)), nodes=max(1, gpus // max(NODE_COUNTS)))
        ways = (Sizes(tensor, gpus // tensor, 1) for tensor in range(alone.count, 0, -1) if gpus % tensor == 0)
        widest = next((sizes for sizes in ways if _structure(alone, sizes) is None), None)
        found = None if widest is None else evaluate_option(alone, widest)
        if found is not None and found.problem is None and (not serving or found.serves):
            return found
    return None


def _options_with(layout: ParallelLayout, pipelines: Iterable[int]) -> tuple[Option, ...]:
    ways = []
    for pipeline in pipelines:
        if layout.gpus % pipeline == 0:
            gpus_per_stage = layout.gpus // pipeline
            tensors = (
                size for size in range(gpus_per_stage, 0, -1) if gpus_per_stage % size == 0 and size <= layout.count
            )
            for tensor in tensors:
                ways += _evaluated(layout, Sizes(tensor, pipeline, gpus_per_stage // tensor))
    return tuple(ways)


def _evaluated(layout: ParallelLayout, sizes: Sizes) -> list[Option]:
    """The verdict on one way; where it only fails since experts cannot be split so, also that on whole experts."""
    split = evaluate_option(layout, sizes)
    reason = split.problem.reason if split.problem else ""
    can_deal = layout.can_deal_experts and (sizes.data == 1 or not layout.is_stoker)
    if layout.whole_experts or not can_deal or reason != "ExpertsNotDivisible":
        return [split]
    return [split, evaluate_option(replace(layout, whole_experts=True), sizes)]


def _structure(layout: ParallelLayout, sizes: Sizes) -> Problem | None:
    """The objection to a way whatever the memory."""
    if layout.max_per_pod is not None and layout.count > layout.max_per_pod:
        # NVIDIA, "MIG User Guide": a process sees one slice.
        message = f"{layout.count} of these cannot work together: they are parts of devices, and a process sees one"
        return Problem("NotTogether", message)
    if sizes.tensor > layout.count:
        message = f"tensor {sizes.tensor} spans nodes, each of which has {layout.count}"
        return Problem("TensorSpansNodes", message)
    whole_experts = layout.whole_experts
    if layout.is_stoker and whole_experts and sizes.data > 1:
        return Problem("ExpertsNotShared", ENGINES_SHARE_NO_EXPERTS)
    if layout.bench is None:
        return None
    shape, numbers = layout.bench.shape, layout.bench.numbers
    if layout.is_stoker:
        found = objection(
            shape.config, sizes.tensor, sizes.pipeline, whole_experts=whole_experts, formats=numbers.formats
        )
        return None if found is None else Problem(*found)
    uneven_heads = heads_problem(shape.heads, shape.kv_heads, sizes.tensor)
    if uneven_heads is not None:
        return Problem(*uneven_heads)
    layers = shape.config.num_hidden_layers
    if sizes.pipeline > layers:
        return Problem("TooFewLayers", f"pipeline {sizes.pipeline} is more than the model's {layers} layers")
    experts = 1 if whole_experts else sizes.tensor * (sizes.data if layout.joint_experts else 1)
    split = uneven(shape, numbers.formats, sizes.tensor, experts)
    return None if split is None else _parted(split, sizes, layout.bench)


def _parted(split: Split, sizes: Sizes, bench: Bench) -> Problem:
    """What is said of shards that are not whole."""
    by = f"tensor {sizes.tensor}"
    if split.shards != sizes.tensor:
        by = f"tensor {sizes.tensor} × data {sizes.data}"
    message = f"{by} splits {split.dimension}, {split.size:,}, into {split.shards} parts"
    if split.size % split.shards == 0 and split.stored:
        size = split.size // split.shards
        message += f" of {size:,}, which are not whole blocks of {split.block} as {split.stored} stores them"
    else:
        message += " that are not whole"
    even_shards = [n for n in range(1, split.shards) if bench.shape.heads % n == 0 and split._replace(shards=n).even]
    message += f" ({' or '.join(map(str, even_shards))} would be)"
    if split.of_experts:
        return Problem("ExpertsNotDivisible", message)
    return Problem("ShardsNotDivisible", message)
