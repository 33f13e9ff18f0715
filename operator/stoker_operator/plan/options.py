"""The parallel layouts in which a replica's accelerators can share a model, and whether each is possible.

The recommended layout is chosen by these criteria, in this order:

    1.  sequences have the length in the spec, or else the model's default
    2.  each engine holds the required number of them at once (`min_concurrency`)
    3.  as many engines as possible: few accelerators per engine, and tensor parallelism rather than pipeline stages

If no layout meets 1 and 2, the one that comes nearest is recommended, length first. More accelerators per engine leave
more memory for its KV cache; more engines serve more requests.

Engines that share nothing are better placed in separate pods (``count`` of one engine, and ``replicas``): a pod's
failure affects one engine only, smaller pods fit on more nodes, and replicas scale in finer steps. Engines of a MoE
model whose experts are distributed over all of them run in lockstep, so they stay in one pod.
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

#: Usual numbers of accelerators per node.
NODE_COUNTS: Final = (1, 2, 4, 8)
#: Maximum number of accelerators in the search for a machine on which a model fits.
_MAX_GPUS: Final = 64
#: Default of the number of sequences that an engine should hold at once.
MIN_CONCURRENCY: Final = 4


@dataclass(frozen=True)
class Option:
    """One parallel layout.

    Attributes:
        sizes: tensor, pipeline and data.
        estimate: memory use of an engine; None if not computed.
        problem: why the layout is not possible, or None if it is possible.
        whole_experts: whether experts are distributed whole over tensor × data accelerators, instead of each being
            split.
        reach: sequence length in tokens, and number of such sequences at once, each limited to the target. An unknown
            value is replaced by the target. Both are 0 without an estimate.
        serves: whether no problem is known and `reach` is the target; False without an estimate.
    """

    sizes: Sizes
    estimate: Estimate | None = None
    problem: Problem | None = None
    whole_experts: bool = False
    reach: tuple[int, int] = (0, 0)
    serves: bool = False

    @property
    def copy_size(self) -> int:
        """Number of accelerators of one engine."""
        return self.sizes.tensor * self.sizes.pipeline

    @property
    def expert(self) -> int:
        """``spec.parallelism.expert`` of this layout; 1 if the field is absent."""
        return self.sizes.tensor * self.sizes.data if self.whole_experts else 1

    @property
    def way(self) -> tuple[Sizes, int]:
        """Identity of the layout among others."""
        return self.sizes, self.expert


@dataclass(frozen=True)
class Advice:
    """A recommended layout, and the fields of a spec for it.

    Attributes:
        option: the layout.
        count: number of accelerators of a pod.
        nodes: number of pods of a replica.
        replicas: number of replicas.
        sizes: tensor, pipeline and data of a replica.
        reason: why it is recommended.
    """

    option: Option
    count: int
    nodes: int
    replicas: int
    sizes: Sizes
    reason: str

    @property
    def apart(self) -> bool:
        """Whether engines that would share a pod are better placed in separate pods."""
        return self.sizes != self.option.sizes


@dataclass(frozen=True)
class ParallelLayout:
    """Inputs that all layouts of a spec share.

    Attributes:
        count: number of accelerators of a pod.
        nodes: number of pods of a replica.
        bench: inputs of an engine's estimate; None if the model's shape is not known.
        joint_experts: whether the engines of a MoE model share its experts: each device of all engines holds a part of
            them.
        whole_experts: whether experts are distributed whole, instead of each being split.
        can_deal_experts: whether the model is known to be MoE, so that its experts may also be distributed whole.
        min_concurrency: number of sequences that an engine should hold at once.
        max_per_pod: maximum number of accelerators that can be used together; None without a limit.
        divisible: whether pods may have fewer accelerators.
        is_stoker: whether the runtime is stoker, which has its own rules for sharding.
        counted: whether the devices are accelerators, whose number the spec states, and not the ranks of a CPU pod.
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
        """Number of accelerators of a replica."""
        return self.count * self.nodes

    def sharding(self, sizes: Sizes) -> Sharding:
        """Return how the devices of an engine share the model."""
        experts = 1
        if self.joint_experts:
            experts = sizes.tensor * sizes.data
        elif self.whole_experts:
            experts = sizes.tensor
        return Sharding(sizes.tensor, sizes.pipeline, experts)


def evaluate_option(layout: ParallelLayout, sizes: Sizes) -> Option:
    """Evaluate one layout."""
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
    """Return the layouts that use every accelerator, by number of stages, then by decreasing tensor size.

    With `pipeline`, all have that number of stages. Otherwise they have one stage and, if a replica spans nodes, also
    one stage per node; if none of these is possible and the weights may fit, layouts with other numbers follow.
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
    """Return the recommended layout by the module's criteria, or None if none is possible or the model is unknown."""
    possible = [option for option in found if option.problem is None and option.estimate is not None]
    return max(possible, key=lambda it: (*it.reach, -it.copy_size, -it.sizes.pipeline), default=None)


def advise(layout: ParallelLayout, found: Sequence[Option], replicas: int) -> Advice | None:
    """Return the recommended layout among `found` as advice for a spec with `replicas`, or None if there is none."""
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
    reason = f"{_reason_text(layout, best)}; better as hardware.count {count}, replicas {replicas}: one engine per pod"
    return Advice(best, count, nodes, replicas, alone, reason)


def _reason_text(layout: ParallelLayout, best: Option) -> str:
    assert layout.bench is not None and best.estimate is not None
    wanted_len = layout.bench.wanted_len
    if layout.bench.memory_bytes is None:
        return "fewest accelerators per engine; their memory is not known"
    if best.serves:
        return f"the most engines, each with room for {layout.min_concurrency} sequences of {wanted_len:,} tokens"
    length, at_once = best.reach
    return f"comes nearest to {layout.min_concurrency} sequences of {wanted_len:,} tokens: {at_once} of {length:,}"


def smallest(layout: ParallelLayout, *, serving: bool = False) -> Option | None:
    """Return a possible layout of one engine on the smallest usual number of accelerators, or None if there is none.

    With `serving`, the engine must also reach the target length and concurrency.
    """
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
    """Evaluate one layout; if it fails only because experts cannot be split evenly, also evaluate it with whole
    experts."""
    split = evaluate_option(layout, sizes)
    reason = split.problem.reason if split.problem else ""
    can_deal = layout.can_deal_experts and (sizes.data == 1 or not layout.is_stoker)
    if layout.whole_experts or not can_deal or reason != "ExpertsNotDivisible":
        return [split]
    return [split, evaluate_option(replace(layout, whole_experts=True), sizes)]


def _structure(layout: ParallelLayout, sizes: Sizes) -> Problem | None:
    """Return why a layout is not possible, regardless of memory; None if no reason is known."""
    if layout.max_per_pod is not None and layout.count > layout.max_per_pod:
        message = (
            f"{layout.count} of these accelerators cannot work together: a pod can use at most {layout.max_per_pod}"
        )
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
    """Return the problem of a dimension that cannot be split evenly."""
    by = f"tensor {sizes.tensor}"
    if split.shards != sizes.tensor:
        by = f"tensor {sizes.tensor} × data {sizes.data}"
    message = f"{by} splits {split.dimension}, {split.size:,}, into {split.shards} parts"
    if split.size % split.shards == 0 and split.stored:
        size = split.size // split.shards
        message += f" of {size:,}, which is not a multiple of {split.stored}'s block size, {split.block}"
    else:
        message += " of unequal size"
    even_shards = [n for n in range(1, split.shards) if bench.shape.heads % n == 0 and split._replace(shards=n).even]
    message += f" ({' or '.join(map(str, even_shards))} would work)"
    if split.of_experts:
        return Problem("ExpertsNotDivisible", message)
    return Problem("ShardsNotDivisible", message)
