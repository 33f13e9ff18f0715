"""Whether the cluster's nodes have room for a pod's accelerators. No I/O.

    never     no matching node has as many accelerators as the pod requests
    not now   a node has them, but it is not ready, or cordoned, or other pods hold them

A node matches unless a label states another kind of accelerator; clusters without feature discovery may lack such
labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stoker_operator.objects.facts import Node
from stoker_operator.plan.catalogue import Accelerator

#: Maximum number of pods, or nodes, that a message names.
_NAMED: Final = 5


class Holder(NamedTuple):
    """A pod that holds resources of a node.

    Attributes:
        name: namespace/name.
        node: name of the node on which it runs.
        requests: number of devices that it holds, by resource.
    """

    name: str
    node: str
    requests: Mapping[str, int]


def capacity(nodes: Sequence[Node], holders: Sequence[Holder], accelerator: Accelerator, count: int) -> str:
    """Return why no node has room for a pod with `count` accelerators; empty if one has, if the nodes are not known, or
    for accelerator cpu."""
    resource = accelerator.resource
    if resource is None or not nodes:
        return ""
    fit = [node for node in nodes if resource in node.allocatable and allows(node, accelerator)]
    largest = max((node.allocatable[resource] for node in fit), default=0)
    demand = f"{count} × {resource}"
    if largest == 0:
        exists_elsewhere = any(node.allocatable.get(resource, 0) for node in nodes)
        reason = _other_kind(nodes, resource) if exists_elsewhere else "none has any"
        return f"no node can ever hold {demand}: {reason}"
    if largest < count:
        return f"no node can ever hold {demand}: the largest has {largest}"
    large = [node for node in fit if node.allocatable[resource] >= count]
    open_ = [node for node in large if node.ready and not node.unschedulable]
    if not open_:
        states = [f"{node.name} ({'cordoned' if node.ready else 'not ready'})" for node in large]
        return f"not now: {_first(states)} could hold {demand}"
    free = {node.name: node.allocatable[resource] - _held(holders, node.name, resource) for node in open_}
    best = max(open_, key=lambda node: free[node.name])
    if free[best.name] >= count:
        return ""
    available, total = max(free[best.name], 0), best.allocatable[resource]
    return f"not now: {available} of {total} free on {best.name}, held by {_holder_names(holders, best.name, resource)}"


def allows(node: Node, accelerator: Accelerator) -> bool:
    """Return whether no label of `node` states another kind of accelerator."""
    return all(key not in node.labels or node.labels[key] in values for key, values in accelerator.node_labels.items())


def _other_kind(nodes: Sequence[Node], resource: str) -> str:
    """Return the reason for nodes that have the resource, but whose labels state another kind of accelerator."""
    labels = [value for node in nodes if node.allocatable.get(resource, 0) for value in node.labels.values()]
    if any(value.endswith("-SHARED") for value in labels):
        return "the nodes that have it are time-sliced; append -shared to the accelerator's name to use a share"
    return "the nodes that have it are labelled as another kind"


def _held(holders: Sequence[Holder], node: str, resource: str) -> int:
    return sum(holder.requests.get(resource, 0) for holder in holders if holder.node == node)


def _holder_names(holders: Sequence[Holder], node: str, resource: str) -> str:
    on_node = [holder for holder in holders if holder.node == node and holder.requests.get(resource, 0)]
    on_node.sort(key=lambda holder: (-holder.requests[resource], holder.name))
    return _first([f"{holder.name} ({holder.requests[resource]})" for holder in on_node])


def _first(texts: Sequence[str]) -> str:
    """Return the first `_NAMED` texts, and the number of the others."""
    return ", ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")
