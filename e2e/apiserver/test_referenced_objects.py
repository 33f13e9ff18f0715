"""Status of pods that run with an older version of a Secret, on a real API server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kubernetes import client, config

from stoker_operator.cluster.kube import Kube

from .cluster_client import SYSTEM
from .operator_process import Operator

SPEC = {
    "model": {"source": "file:///models/a"},
    "engine": {"runtime": "vllm", "image": "x"},
    "auth": {"apiKeysSecretRef": {"name": "keys"}},
}


def permit(kube: Any, ns: str) -> None:
    """Grant the rights of the chart's rbac.readReferencedObjects in a namespace."""
    rbac = client.RbacAuthorizationV1Api(kube.api)
    metadata = {"name": "referenced-objects"}
    rule = {"apiGroups": [""], "resources": ["secrets", "configmaps"], "verbs": ["get"]}
    rbac.create_namespaced_role(ns, {"metadata": metadata, "rules": [rule]})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]}
    subject = {"kind": "ServiceAccount", "name": "stoker", "namespace": SYSTEM}
    rbac.create_namespaced_role_binding(ns, {"metadata": metadata, "roleRef": reference, "subjects": [subject]})


def serve(kube: Any, ns: str, started: str) -> None:
    """Mark all pods as ready, started at the given time."""
    engine = {"name": "engine", "image": "x", "imageID": "", "ready": True, "restartCount": 0}
    engine["state"] = {"running": {"startedAt": started}}
    for pod in kube.pods(ns, "demo"):
        now = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}Z"
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        kube.set_pod_status(ns, pod.metadata.name, phase="Running", conditions=[ready], containerStatuses=[engine])


def test_status_names_pods_with_an_earlier_key(
    kube: Any,
    ns: str,
    document: Any,
    sleeping_operator: Operator,
    operators_kubeconfig: Path,
    tmp_path: Path,
    eventually: Any,
) -> None:
    sleeping_operator.stop()
    permit(kube, ns)
    kube.core.create_namespaced_secret(ns, {"metadata": {"name": "keys"}, "stringData": {"api-key": "first"}})
    long_ago = "2020-01-01T00:00:00Z"

    def ready() -> str:
        found = kube.condition(ns, "demo")
        return found.get("message", "") if found.get("status") == "True" else ""

    options = f"--namespace={ns}", "--check-referenced-objects", "--resync-seconds=2"
    with Operator(operators_kubeconfig, tmp_path / "log", *options):
        kube.create(ns, document(**SPEC))
        eventually(lambda: kube.pods(ns, "demo"), "it has a pod")
        serve(kube, ns, f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}Z")
        assert eventually(ready, "it is ready") == "1 of 1 pods are ready with the newest spec"

        serve(kube, ns, long_ago)
        pod, created = next((each.metadata.name, each.metadata.creation_timestamp) for each in kube.pods(ns, "demo"))
        # Times are whole seconds: a change in the second of the pod's creation may be before or after it.
        eventually(lambda: time.time() > created.timestamp() + 1, "the second of the creation of the pod has passed")
        kube.core.patch_namespaced_secret("keys", ns, {"stringData": {"api-key": "second"}})
        message = eventually(lambda: ready() if "Secret" in ready() else "", "the condition names the Secret")
        assert f"pod {pod} runs with Secret keys (spec.auth.apiKeysSecretRef) as it was before 2" in message
        assert message.endswith(f"kubectl rollout restart deployment/demo --namespace {ns} updates them")

        def events() -> list[Any]:
            found = kube.core.list_namespaced_event(ns).items
            return [each for each in found if "as it was before" in each.message]

        (event,) = eventually(events, "an Event names the Secret")  # it is written after the condition
        assert (event.reason, event.type) == ("Ready", "Normal")

        restart = {"kubectl.kubernetes.io/restartedAt": long_ago}
        change = {"spec": {"template": {"metadata": {"annotations": restart}}}}
        kube.apps.patch_namespaced_deployment("demo", ns, change)

        def renewed() -> bool:
            serve(kube, ns, f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}Z")
            return ready() == "1 of 1 pods are ready with the newest spec" and pod not in str(kube.pods(ns, "demo"))

        eventually(renewed, "the condition ignores the new pod")

    # RBAC permits whole Secrets; the operator's requests return only metadata.
    api = config.new_client_from_config(str(operators_kubeconfig))
    found = Kube(api).metadata("Secret", ns, "keys")
    assert found and "f:data" in json.dumps(found["managedFields"])
    assert "annotations" not in found
    accept = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
    request = api.param_serialize("GET", f"/api/v1/namespaces/{ns}/secrets/keys", header_params=accept,
                                  auth_settings=["BearerToken"])  # fmt: skip
    assert set(json.loads(api.call_api(*request).read())) == {"kind", "apiVersion", "metadata"}
