"""The accelerators of a cluster by kind, and how many of them are free. No I/O.

A node's labels state the kind of its devices (`Accelerator.node_labels`); a device plugin's resource does not suffice
if several kinds share it. Devices of nodes that are cordoned or not ready are counted, but not as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker_operator.objects.facts import Node
from stoker_operator.plan.capacity import Holder
from stoker_operator.plan.catalogue import Catalogue


@dataclass(frozen=True)
class Stock:
    """The accelerators of one kind in the cluster.

    Attributes:
        key: its key in the catalogue; empty if the labels do not show the kind.
        resource: resource name of its device plugin.
        sizes: number of devices of each node that has some.
        free: number of devices that no pod holds, in the same order; None if pods cannot be listed.
        topology: topology of the slices, if pods must select one; otherwise empty.
        why_unknown: why the kind is not known, if `key` is empty.
    """

    key: str
    resource: str
    sizes: tuple[int, ...]
    free: tuple[int, ...] | None
    topology: str = ""
    why_unknown: str = ""

    @property
    def largest(self) -> int:
        """Maximum number of devices of a node."""
        return max(self.sizes)

    def pods_now(self, count: int) -> int | None:
        """Return for how many pods with `count` devices each there is room now, or None if it is not known."""
        return None if self.free is None else sum(free // count for free in self.free)


def stocks(nodes: Sequence[Node], holders: Sequence[Holder] | None, catalogue: Catalogue) -> tuple[Stock, ...]:
    """Return the accelerators of the cluster, in the catalogue's order; unknown kinds come last.

    Args:
        nodes: all nodes.
        holders: all pods that hold devices; None if pods cannot be listed.
        catalogue: known kinds.
    """
    resources = {entry.resource for entry in catalogue.accelerators.values() if entry.resource}
    found: dict[tuple[str, str, str], list[Node]] = {}
    for node in nodes:
        for resource in sorted(resources & node.allocatable.keys()):
            if node.allocatable[resource]:
                key = kind_of(node, resource, catalogue)
                label = catalogue.accelerator(key).topology_label if key else None
                found.setdefault((key, resource, node.labels.get(label or "", "")), []).append(node)
    order = {key: index for index, key in enumerate(catalogue.every_key())}
    kinds = sorted(found, key=lambda kind: (order.get(kind[0], len(order)), kind))
    return tuple(_stock(kind, found[kind], holders, catalogue) for kind in kinds)


def kind_of(node: Node, resource: str, catalogue: Catalogue) -> str:
    """Return the key of the node's devices of a resource; empty if not known.

    This is the first kind with a matching label, or else the only kind of that resource for which the catalogue has no
    labels.
    """
    kinds = {key: catalogue.accelerator(key) for key in catalogue.every_key()}
    kinds = {key: kind for key, kind in kinds.items() if kind.resource == resource}
    vouched = [
        key
        for key, kind in kinds.items()
        if any(node.labels.get(label) in values for label, values in kind.node_labels.items())
    ]
    unlabelled = [key for key, kind in kinds.items() if not kind.node_labels]
    return next(iter(vouched or (unlabelled if len(unlabelled) == 1 else ())), "")


def _stock(
    kind: tuple[str, str, str], nodes: Sequence[Node], holders: Sequence[Holder] | None, catalogue: Catalogue
) -> Stock:
    key, resource, topology = kind
    sizes = tuple(node.allocatable[resource] for node in nodes)
    free = None
    if holders is not None:
        held: dict[str, int] = {}
        for holder in holders:
            held[holder.node] = held.get(holder.node, 0) + holder.requests.get(resource, 0)
        unheld = (
            node.allocatable[resource] - held.get(node.name, 0) if node.ready and not node.unschedulable else 0
            for node in nodes
        )
        free = tuple(max(each, 0) for each in unheld)
    reason = "" if key else _why_unknown(nodes, resource, catalogue)
    return Stock(key, resource, sizes, free, topology, reason)


def _why_unknown(nodes: Sequence[Node], resource: str, catalogue: Catalogue) -> str:
    kinds = {key: entry for key, entry in catalogue.accelerators.items() if entry.resource == resource}
    labels = list(dict.fromkeys(label for entry in kinds.values() for label in entry.node_labels))
    if not labels:
        return f"the kind is {' or '.join(kinds)}, and no label shows which; specify --accelerator"
    label_values = sorted({node.labels[label] for node in nodes for label in labels if label in node.labels})
    unlabelled = sum(not any(label in node.labels for label in labels) for node in nodes)
    parts = [f"not in the accelerator catalogue: {', '.join(label_values)}"] if label_values else []
    parts += [f"nodes without the label {' or '.join(labels)}: {unlabelled}"] if unlabelled else []
    return "; ".join(parts)
