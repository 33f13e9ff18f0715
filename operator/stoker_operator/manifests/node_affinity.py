"""Which nodes have an accelerator, as far as their labels show.

A device plugin's resource (``nvidia.com/gpu``) counts accelerators and does not say which; labels do, where some
feature discovery sets them. So a pod goes to a node that one of the labels vouches for, or to one that has none of
them: a cluster without feature discovery has only the count to go by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker_operator.objects.owner import Manifest


def node_affinity(labels: Mapping[str, Sequence[str]]) -> Manifest | None:
    """The affinity for nodes with one of the values of a label; None where no label is known."""
    if not labels:
        return None
    vouched: list[Manifest] = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]} for key, values in labels.items()
    ]
    silent: Manifest = {"matchExpressions": [{"key": key, "operator": "DoesNotExist"} for key in labels]}
    required = {"nodeSelectorTerms": [*vouched, silent]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
