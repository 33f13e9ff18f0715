"""The Service in front of an endpoint's pods."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.exposure import DEFAULT_PORT
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.runtimes.registry import RUNTIMES


def service(owner: Owner, spec: Spec, pods: Mapping[str, str]) -> Manifest:
    """Return the endpoint's Service, which selects the pods with these labels."""
    metadata = owner.metadata()
    metadata["labels"] = {**(spec.service.labels or {}), **metadata["labels"]}
    if spec.service.annotations:
        metadata["annotations"] = dict(spec.service.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": spec.service.type or "ClusterIP",
            "ipFamilyPolicy": "PreferDualStack",
            "selector": dict(pods),
            "ports": [{"name": "http", "port": port(spec), "targetPort": "http", "protocol": "TCP"}],
        },
    }


def url(owner: Owner, spec: Spec) -> str:
    """Return the base URL for clients in the cluster, which works under any cluster domain."""
    engine = RUNTIMES.get(spec.engine.runtime)
    scheme = "https" if engine and engine.speaks_tls(spec) else "http"
    return f"{scheme}://{owner.object_name}.{owner.namespace}.svc:{port(spec)}/v1"


def port(spec: Spec) -> int:
    """Return the Service's port."""
    return spec.service.port or DEFAULT_PORT
