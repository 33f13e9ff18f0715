"""Whether the cluster's own controllers work: without them no pod is replaced, or taken out of a Service."""

from __future__ import annotations

from datetime import datetime

from kit.cluster import Cluster


def controllers_live(cluster: Cluster, since: float) -> bool:
    """Whether those that end when they cannot renew their Lease have renewed it; a cluster of yours may hide them.

    Args:
        since: in seconds since 1970, on the nodes' clock.
    """
    leases = cluster.get("leases", "--namespace", "kube-system")["items"]
    return all(
        lease["spec"].get("holderIdentity") and datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp() > since
        for lease in leases
        if lease["metadata"]["name"] in ("kube-controller-manager", "kube-scheduler")
    )
