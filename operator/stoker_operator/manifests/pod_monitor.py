"""The PodMonitor by which the Prometheus operator scrapes an endpoint's pods."""

from __future__ import annotations

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.policy.policy import Policy
from stoker_operator.runtimes.registry import runtime


def pod_monitor(owner: Owner, spec: Spec, known: bool, policy: Policy) -> Manifest | None:
    """Return the endpoint's PodMonitor, or None if it is disabled or the cluster lacks the kind.

    Args:
        owner: the endpoint.
        spec: its spec.
        known: whether the cluster has PodMonitors.
        policy: the administrator's settings of PodMonitors.

    Raises:
        Refused: the spec requires a PodMonitor, and the cluster lacks the kind.
    """
    mode = spec.monitoring.mode
    if mode == "Enabled" and not known:
        raise Refused(
            Violation(
                "spec.monitoring.podMonitor",
                "this cluster does not have the kind PodMonitor",
                "install the Prometheus operator, or set podMonitor: Auto",
                reason="NoPodMonitors",
            )
        )
    if mode == "Disabled" or not known or (mode == "Auto" and policy.pod_monitors is False):
        return None
    engine = runtime(spec.engine.runtime)
    scraped: Manifest = {"port": "http", "path": engine.metrics_path}
    if engine.speaks_tls(spec):
        # Pods are scraped by IP address, which their certificates need not contain.
        scraped |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    metadata = owner.metadata()
    metadata["labels"] = {**(policy.pod_monitor_labels or {}), **metadata["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {"selector": {"matchLabels": owner.selector()}, "podMetricsEndpoints": [scraped]},
    }
