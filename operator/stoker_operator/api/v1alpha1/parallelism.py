"""Rules about parallel sizes, above all tensor × pipeline × data = count × nodes.

This equation does not apply to accelerator cpu, where absent sizes are 1. ``hardware.allowIdle`` permits a smaller
product.

An absent tensor or data follows from the other sizes (`resolve`). Sizes that break the rule are refused, with a message
that names sizes that obey it. The named sizes need not suit the model, which is not known here; `plan.ways_out`
replaces them with planned sizes if the model's shape is known. The calculation is written in Python and in CEL, where
``self`` is a workload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.hardware import CPU, MAX_COUNT, MAX_GPUS

if TYPE_CHECKING:
    from stoker_operator.api.v1alpha1.workload import Workload

Size = Annotated[int, Field(ge=1, le=MAX_GPUS)]


#: Name of the runtime of Stoker's own engine.
OURS: Final = "stoker"
#: Fields with the size of each kind of parallelism.
SIZES: Final = ("tensor", "data", "pipeline", "expert")


def _chosen_twice(size: str) -> Rule:
    return Rule(
        field="mode",
        holds=lambda it: it.mode is None or getattr(it, size) is None,
        cel=f"!has(self.mode) || !has(self.{size})",
        message=f"mode Auto chooses {size}, but {size} is also set",
        remedy=f"remove mode or {size}",
    )


class Parallelism(Part):
    """The sizes of each kind of parallelism, or how they are chosen."""

    mode: Literal["Auto"] | None = None
    """Auto: the operator uses the sizes that `stoker plan` recommends for the replica's accelerators, and reports them
    in the status. If the model's shape is not known, tensor is hardware.count, and pipeline hardware.nodes. Absent:
    tensor, data, pipeline and expert state the sizes."""
    min_concurrency: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Number of sequences, each of engine.maxModelLen or else of the model's default length, that each engine should
    hold at once. The recommended sizes aim at it, and sizes with less room cause a warning. Absent: 4."""
    tensor: Size | None = None
    """Number of accelerators over which each layer of an engine is split (tensor parallelism)."""
    data: Size | None = None
    """Number of engines of a replica, each with its own accelerators, KV cache and requests (data parallelism)."""
    pipeline: Size | None = None
    """Number of stages over which the layers of an engine are distributed, each with its own accelerators (pipeline
    parallelism). Absent without mode: 1."""
    expert: Size | None = None
    """Number of accelerators over which the experts of a mixture-of-experts model are distributed whole (expert
    parallelism). It must be tensor × data. Absent without mode: each expert is split over tensor, with runtime vllm
    over tensor × data."""

    RULES: ClassVar = tuple(map(_chosen_twice, SIZES))


class Sizes(NamedTuple):
    """Sizes of tensor, pipeline and data parallelism."""

    tensor: int
    pipeline: int
    data: int

    @property
    def used(self) -> int:
        """Number of ranks; each uses an accelerator, except on a CPU."""
        return self.tensor * self.pipeline * self.data


def resolve(gpus: int, parallelism: Parallelism | None) -> Sizes:
    """Return the sizes of `parallelism`; absent ones are 1 or follow from the others.

    Their product may be more or less than `gpus`, the accelerators of a replica.
    """
    parallelism = parallelism or Parallelism()
    pipeline = parallelism.pipeline or 1
    if parallelism.tensor is None:
        data = parallelism.data or 1
        return Sizes(max(1, gpus // (pipeline * data)), pipeline, data)
    return Sizes(parallelism.tensor, pipeline, parallelism.data or max(1, gpus // (pipeline * parallelism.tensor)))


def options(gpus: int) -> list[tuple[int, int]]:
    """Return every (tensor, data) that uses `gpus` accelerators, in descending order of tensor."""
    return [(tensor, gpus // tensor) for tensor in range(gpus, 0, -1) if gpus % tensor == 0]


def sizes_that_fill(gpus: int) -> str:
    """Return the rule for the fields tensor and data with `gpus` accelerators, and the sizes that obey it."""
    return f"tensor × data must be {gpus} ({_any_of(f'{tensor} × {data}' for tensor, data in options(gpus))})"


def pipelines_that_fill(gpus: int) -> str:
    """Return the rule for the field pipeline with `gpus` accelerators, and the sizes that obey it."""
    return f"pipeline must divide {gpus} ({_any_of(str(size) for size in range(1, gpus + 1) if gpus % size == 0)})"


def _any_of(sizes: Iterable[str]) -> str:
    *leading, last = sizes
    return f"{', '.join(leading)} or {last}" if leading else last


def fills_the_replica(workload: Workload) -> bool:
    """Return whether the sizes use all accelerators of a replica, or fewer with ``allowIdle``; True if other rules
    check them."""
    hardware = workload.hardware
    if hardware.accelerator == CPU or hardware.gpus > MAX_GPUS:
        return True
    used = workload.sizes.used
    return used == hardware.gpus or (used < hardware.gpus and bool(hardware.allow_idle))


def explain(workload: Workload) -> tuple[str, str]:
    """Return what is wrong with the product of the sizes, and what the rule allows."""
    hardware, sizes = workload.hardware, workload.sizes
    gpus, used = hardware.gpus, sizes.used
    parallelism = workload.parallelism
    product = f"tensor ({sizes.tensor}) × data ({sizes.data})"
    if parallelism and parallelism.pipeline is not None:
        product += f" × pipeline ({sizes.pipeline})"
    gpus_per_stage = gpus // sizes.pipeline
    if gpus % sizes.pipeline:
        choice = pipelines_that_fill(gpus)
    elif hardware.pods_per_replica > 1:
        choice = f"tensor must be at most {hardware.accelerators}, and tensor × data {gpus_per_stage}"
    else:
        choice = sizes_that_fill(gpus_per_stage)
    if used < gpus:
        idle = gpus - used
        problem = f"{product} uses {used} of {gpus} GPUs, {idle} would be idle"
        return problem, f"{choice}, or hardware.allowIdle true"
    if hardware.pods_per_replica == 1 and used <= MAX_COUNT:
        choice += f", or hardware.count {used}"
    return f"{product} needs {used} GPUs, {gpus} available", choice


# The same in CEL, which has no variables: `map` over a list of one item makes the item a variable.
# The API server limits the estimated cost of an expression. Joining strings of unknown length would exceed this limit;
# `format` and lookups in a table are cheap.
def _cel_or_default(part: str, field: str, absent: int) -> str:
    return f"(has(self.{part}) && has(self.{part}.{field}) ? self.{part}.{field} : {absent})"


_COUNT, _NODES = _cel_or_default("hardware", "count", 1), _cel_or_default("hardware", "nodes", 1)
_TENSOR, _DATA = _cel_or_default("parallelism", "tensor", 0), _cel_or_default("parallelism", "data", 0)
_PIPELINE = _cel_or_default("parallelism", "pipeline", 1)
_DATA_ON_CPU = _cel_or_default("parallelism", "data", 1)
# [tensor, pipeline, data, gpus], computed as in `resolve`.
_SIZES = (
    f"[[{_COUNT} * {_NODES}, {_PIPELINE}, {_TENSOR}, {_DATA}]].map(g, ["
    "g[2] > 0 ? g[2] : [1, g[0] / (g[1] * [1, g[3]].max())].max(), "
    "g[1], "
    "g[3] > 0 ? g[3] : g[2] > 0 ? [1, g[0] / (g[1] * g[2])].max() : 1, "
    "g[0]])"
)
_NOT_COUNTED = f"self.hardware.accelerator == '{CPU}' || {_COUNT} * {_NODES} > {MAX_GPUS}"
_IDLE_ALLOWED = "has(self.hardware.allowIdle) && self.hardware.allowIdle"
_FILLS = (
    f"{_NOT_COUNTED} || {_SIZES}.all(s, s[0] * s[1] * s[2] == s[3] || (s[0] * s[1] * s[2] < s[3] && {_IDLE_ALLOWED}))"
)
_IS_AUTO = "has(self.parallelism) && has(self.parallelism.mode)"
_SPANS_NO_NODE = f"{_NOT_COUNTED} || {_NODES} == 1 || ({_IS_AUTO}) || {_SIZES}.all(s, s[0] <= {_COUNT})"
_PRODUCT = (
    "(has(self.parallelism) && has(self.parallelism.pipeline)"
    " ? 'tensor (%d) × data (%d) × pipeline (%d)'.format([s[0], s[2], s[1]])"
    " : 'tensor (%d) × data (%d)'.format([s[0], s[2]]))"
)
_PROBLEM = (
    "(s[0] * s[1] * s[2] < s[3]"
    " ? 'uses %d of %d GPUs, %d would be idle'.format([s[0] * s[1] * s[2], s[3], s[3] - s[0] * s[1] * s[2]])"
    " : 'needs %d GPUs, %d available'.format([s[0] * s[1] * s[2], s[3]]))"
)
_CHOICE = (
    f"(s[3] % s[1] != 0 ? { {gpus: pipelines_that_fill(gpus) for gpus in range(1, MAX_GPUS + 1)} }[s[3]]"
    f" : {_NODES} > 1 ? 'tensor must be at most %d, and tensor × data %d'.format([{_COUNT}, s[3] / s[1]])"
    f" : { {gpus: sizes_that_fill(gpus) for gpus in range(1, MAX_COUNT + 1)} }[s[3] / s[1]])"
)
_MORE = (
    "(s[0] * s[1] * s[2] < s[3] ? ', or hardware.allowIdle true'"
    f" : {_NODES} == 1 && s[0] * s[1] * s[2] <= {MAX_COUNT}"
    " ? ', or hardware.count %d'.format([s[0] * s[1] * s[2]]) : '')"
)
_EXPLAIN = f"{_SIZES}.map(s, '%s %s; %s%s'.format([{_PRODUCT}, {_PROBLEM}, {_CHOICE}, {_MORE}]))[0]"


def most_engines(workload: Workload) -> int:
    """Return the maximum number of engines of a replica: mode Auto may choose one for each accelerator."""
    if workload.hardware.accelerator != CPU and workload.parallelism and workload.parallelism.mode:
        return workload.hardware.gpus
    return workload.sizes.data


#: `most_engines` in CEL.
CEL_MOST_ENGINES: Final = (
    f"(self.hardware.accelerator == '{CPU}' ? {_DATA_ON_CPU} : {_IS_AUTO} ? {_COUNT} * {_NODES} : "
    f"{_SIZES}.map(s, s[2])[0])"
)


def _product_of(*fields: str) -> str:
    return " * ".join(_cel_or_default("parallelism", field, 1) for field in fields)


RULES = (
    Rule(
        field="parallelism",
        holds=fills_the_replica,
        cel=_FILLS,
        message="tensor × pipeline × data must equal count × nodes",
        remedy="change one of them",
        explain=explain,
        explain_cel=_EXPLAIN,
    ),
    Rule(
        field="parallelism",
        holds=lambda it: (
            it.hardware.accelerator == CPU
            or it.hardware.gpus > MAX_GPUS
            or it.hardware.pods_per_replica == 1
            or (it.parallelism is not None and it.parallelism.mode is not None)
            or it.sizes.tensor <= it.hardware.accelerators
        ),
        cel=_SPANS_NO_NODE,
        message="tensor (absent: all accelerators that pipeline and data leave) is more than the accelerators of a pod",
        remedy="set mode: Auto, or tensor to at most hardware.count, with pipeline or data for the other nodes",
    ),
    Rule(
        field="parallelism",
        holds=lambda it: it.hardware.accelerator != CPU or it.sizes.used <= MAX_COUNT,
        cel=f"self.hardware.accelerator != '{CPU}' || {_product_of('tensor', 'data', 'pipeline')} <= {MAX_COUNT}",
        message=f"tensor × pipeline × data is more than {MAX_COUNT}, the maximum number of ranks of a pod",
        remedy="lower one of them, and use spec.replicas for more engines",
    ),
    Rule(
        field="parallelism",
        holds=lambda it: (
            it.hardware.accelerator != CPU
            or it.engine.runtime == OURS
            or it.parallelism is None
            or all(getattr(it.parallelism, size) in (None, 1) for size in SIZES)
        ),
        cel=f"self.hardware.accelerator != '{CPU}' || !has(self.engine) || !has(self.engine.runtime) || "
        f"self.engine.runtime == '{OURS}' || !has(self.parallelism) || ("
        + " && ".join(f"(!has(self.parallelism.{size}) || self.parallelism.{size} == 1)" for size in SIZES)
        + ")",
        message=f"on accelerator cpu, a runtime other than {OURS} runs a single engine of one process",
        remedy=f"remove parallelism, and use spec.replicas for more engines, or use runtime: {OURS}",
    ),
)
