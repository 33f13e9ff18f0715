"""Whether the cluster's own controllers work: without them, pods are neither replaced nor removed from Services."""

from __future__ import annotations

from datetime import datetime

from kit.cluster import Cluster


def controllers_live(cluster: Cluster, since: float) -> bool:
    """Return whether kube-controller-manager and kube-scheduler have renewed their Leases since `since`.

    Without its Lease a controller exits. A managed cluster may hide these Leases; the result is then True.

    Args:
        since: seconds since 1970, by the nodes' clock.
    """
    leases = cluster.get("leases", "--namespace", "kube-system")["items"]
    return all(
        lease["spec"].get("holderIdentity") and datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp() > since
        for lease in leases
        if lease["metadata"]["name"] in ("kube-controller-manager", "kube-scheduler")
    )
