"""Node affinity for an accelerator, by the nodes' labels.

A device plugin's resource (``nvidia.com/gpu``) does not distinguish a vendor's accelerators. Labels of nodes do, if
feature discovery sets them. So a pod may run on a node with a matching label, or on one with none of the labels, for
clusters without feature discovery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker_operator.objects.owner import Manifest


def node_affinity(labels: Mapping[str, Sequence[str]]) -> Manifest | None:
    """Return the affinity for nodes with a matching label or without these labels, or None if no labels are known."""
    if not labels:
        return None
    vouched: list[Manifest] = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]} for key, values in labels.items()
    ]
    silent: Manifest = {"matchExpressions": [{"key": key, "operator": "DoesNotExist"} for key in labels]}
    required = {"nodeSelectorTerms": [*vouched, silent]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
