"""Installation of KEDA from its own manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kit.cluster import Cluster, Object
from kit.waiting import wait_for

_NAMESPACE = "keda"
#: Parts of KEDA's manifests to apply. The webhooks only validate objects, and are left out.
_PARTS = ("general/namespace.yaml", "crd/bases", "service_account", "rbac", "manager", "metrics-server")
#: Time for KEDA's two Deployments to become available while other pods start, in seconds.
_START_S = 240


def _documents(config: Path) -> Iterator[Object]:
    for part in _PARTS:
        found = config / part
        for file in sorted(found.glob("*.yaml")) if found.is_dir() else [found]:
            if file.name != "kustomization.yaml":
                yield from filter(None, yaml.safe_load_all(file.read_text()))


def _adapted(document: Object, image: str) -> Object:
    """Set an image that the nodes have, as kustomize does, and requests for a small node."""
    if document["kind"] == "Deployment":
        pod = document["spec"]["template"]["spec"]
        for container in pod["containers"]:
            container |= {"image": image, "imagePullPolicy": "IfNotPresent"}
            container["resources"]["requests"] = {"cpu": "20m", "memory": "64Mi"}
            if document["metadata"]["name"] == "keda-operator":
                container["args"].append("--enable-webhook-patching=false")
    if document["kind"] == "APIService":
        # TLS is verified: KEDA's operator writes its CA bundle into this object.
        document["spec"].setdefault("insecureSkipTLSVerify", False)
    return document


@contextmanager
def installed(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run KEDA in the cluster during the block.

    Args:
        folder: path that ``e2e/keda/build`` prints.
    """
    image = (folder / "image-name").read_text().strip()
    documents = [_adapted(each, image) for each in _documents(folder / "config")]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    # The CRDs are too long for kubectl's last-applied annotation.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    try:
        wait_for(lambda: _serves(cluster), "KEDA's external metrics are served", _START_S)
        yield
    finally:
        cluster.kubectl("delete", "scaledobjects.keda.sh", "--all", "--all-namespaces", "--timeout=60s", check=False)
        cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=text, check=False)


def _serves(cluster: Cluster) -> bool:
    service = cluster.get("apiservice", "v1beta1.external.metrics.k8s.io")
    conditions: list[Any] = service.get("status", {}).get("conditions", [])
    return any(each["type"] == "Available" and each["status"] == "True" for each in conditions)
