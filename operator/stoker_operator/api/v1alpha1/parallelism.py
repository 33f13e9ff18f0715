"""tensor × data = count: the one rule of the resource that computes.

What is absent follows from what is there (`resolve`), and what does not come out whole is refused with the
pairs that would. The same arithmetic stands here in Python and in CEL; ``self`` is the endpoint's spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.hardware import CPU, MAX_COUNT

if TYPE_CHECKING:
    from stoker_operator.api.v1alpha1.spec import Spec


def resolve(count: int, tensor: int | None, data: int | None) -> tuple[int, int] | None:
    """The tensor and data sizes that `count` accelerators are used by; None where they do not come out whole."""
    if tensor is None and data is None:
        return count, 1
    if tensor is None:
        tensor = count // (data or 1)
    elif data is None:
        data = count // tensor
    assert tensor is not None and data is not None
    return (tensor, data) if tensor * data == count else None


def options(count: int) -> list[tuple[int, int]]:
    """Every (tensor, data) that uses `count` accelerators, the widest copy first."""
    return [(tensor, count // tensor) for tensor in range(count, 0, -1) if count % tensor == 0]


def remedy(count: int) -> str:
    """The `options`, to choose from."""
    return "use " + " or ".join(f"tensor {tensor}, data {data}" for tensor, data in options(count))


def fills_the_pod(spec: Spec) -> bool:
    """Whether tensor × data is what a pod has."""
    given = spec.parallelism
    if given is None or spec.hardware.accelerator == CPU:
        return True
    return resolve(spec.hardware.accelerators, given.tensor, given.data) is not None


def explain(spec: Spec) -> tuple[str, str]:
    """What is wrong with tensor × data, and what would be right."""
    count = spec.hardware.accelerators
    given = spec.parallelism
    assert given is not None
    if given.tensor is None or given.data is None:
        name, value = ("tensor", given.tensor) if given.data is None else ("data", given.data)
        return f"{name} ({value}) does not divide hardware.count ({count})", remedy(count)
    used = given.tensor * given.data
    product = f"tensor ({given.tensor}) × data ({given.data})"
    if used < count:
        return f"{product} uses {used} of {count} GPUs, {count - used} would be idle", remedy(count)
    more = f", or set hardware.count to {used}" if used <= MAX_COUNT else ""
    return f"{product} needs {used} GPUs but hardware.count is {count}", remedy(count) + more


# The same in CEL.
_COUNT = "(has(self.hardware.count) ? self.hardware.count : 1)"
_T, _D = "self.parallelism.tensor", "self.parallelism.data"
_FILLS = (
    f"self.hardware.accelerator == '{CPU}' || !has(self.parallelism) || ("
    f"has({_T}) && has({_D}) ? {_T} * {_D} == {_COUNT} : "
    f"has({_T}) ? {_COUNT} % {_T} == 0 : "
    f"has({_D}) ? {_COUNT} % {_D} == 0 : true)"
)
# The API server bounds beforehand what an expression may cost. Joining strings of unknown length is beyond that
# bound; `format` and a look-up in a table are cheap.
_PROBLEM = (
    f"!has({_D}) ? 'tensor (%d) does not divide hardware.count (%d)'.format([{_T}, {_COUNT}]) : "
    f"!has({_T}) ? 'data (%d) does not divide hardware.count (%d)'.format([{_D}, {_COUNT}]) : "
    f"{_T} * {_D} < {_COUNT} ? 'tensor (%d) × data (%d) uses %d of %d GPUs, %d would be idle'"
    f".format([{_T}, {_D}, {_T} * {_D}, {_COUNT}, {_COUNT} - {_T} * {_D}]) : "
    "'tensor (%d) × data (%d) needs %d GPUs but hardware.count is %d'"
    f".format([{_T}, {_D}, {_T} * {_D}, {_COUNT}])"
)
_REMEDY = f"{ {count: remedy(count) for count in range(1, MAX_COUNT + 1)} }[{_COUNT}]"
_MORE = (
    f"has({_T}) && has({_D}) && {_T} * {_D} > {_COUNT} && {_T} * {_D} <= {MAX_COUNT}"
    f" ? ', or set hardware.count to %d'.format([{_T} * {_D}]) : ''"
)
_EXPLAIN = f"'%s; %s%s'.format([{_PROBLEM}, {_REMEDY}, {_MORE}])"

FILLS_THE_POD = Rule(
    field="parallelism",
    holds=fills_the_pod,
    cel=_FILLS,
    message="tensor × data must equal hardware.count",
    remedy="change one of them",
    explain=explain,
    explain_cel=_EXPLAIN,
)
