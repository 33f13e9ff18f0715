"""The chart grants exactly the rights that the operator uses. The test makes the operator do everything that it can do,
and reads the API server's audit log.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from stoker_operator.api.manifest import parse
from stoker_operator.reconcile.pinning import ANNOTATION, digest

CHART = Path(__file__).parents[2] / "charts/stoker"
SYSTEM = "stoker-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:stoker"

#: Granted rights that this test does not observe, with the reason.
UNSEEN = {
    # Needed only on clusters with the admission plugin OwnerReferencesPermissionEnforcement.
    ("stoker.dev", "inferenceendpoints/finalizers", "update"),
}


def granted(helm: str) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of all roles of the operator."""
    command = [helm, "template", "stoker", CHART, f"--namespace={SYSTEM}"]
    documents = yaml.safe_load_all(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {
        (group, resource, verb)
        for document in documents
        if document and document["kind"] in ("Role", "ClusterRole") and is_the_operators(document["metadata"])
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def is_the_operators(metadata: Any) -> bool:
    """Return whether a role belongs to neither a hook nor users."""
    return "helm.sh/hook" not in str(metadata) and "aggregate-to-" not in str(metadata["labels"])


def used(kube: Any) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of all of the operator's requests."""
    found = set()
    for event in kube.server.requests():
        if event["user"]["username"] == ACCOUNT and "resource" in event.get("objectRef", {}):
            about = event["objectRef"]
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            found.add((about.get("apiGroup", ""), resource, event["verb"]))
            if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
                found.add((about.get("apiGroup", ""), resource, "create"))  # server-side apply of a new object
    return found


def test_granted_rights_equal_the_used_ones(
    kube: Any, helm: str, ns: str, document: Any, start: Any, pod_monitors: None, eventually: Any
) -> None:
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    kube.core.create_namespaced_persistent_volume_claim(ns, {"metadata": {"name": "weights"}, "spec": claim})
    replica = start()
    template = {"volumeClaimTemplate": {"spec": claim}}
    kube.create(ns, document("all", replicas=2, storage={"cache": template}))
    existing = {"persistentVolumeClaim": {"claimName": "weights"}}
    kube.create(ns, document("claims", replicas=0, storage={"cache": existing}))

    objects = {
        "deployments": "apps/v1",
        "networkpolicies": "networking.k8s.io/v1",
        "poddisruptionbudgets": "policy/v1",
        "podmonitors": "monitoring.coreos.com/v1",
    }
    paths = {kind: f"/apis/{version}/namespaces/{ns}/{kind}/all" for kind, version in objects.items()}
    for kind, path in paths.items():
        eventually(lambda path=path: kube.get(path), f"it has its {kind}")
    eventually(lambda: kube.condition(ns, "all"), "it is reported")

    hopeless(kube, ns, document, eventually)

    # For a pod that takes long to start, the operator reads its Events.
    node = f"node-{ns}"
    kube.core.create_node({"metadata": {"name": node}})
    pod = eventually(lambda: kube.pods(ns, "all"), "it has pods")[0].metadata.name
    binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": node}}
    kube.core.create_namespaced_pod_binding(pod, ns, binding, _preload_content=False)
    waiting = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    eventually(lambda: kube.set_pod_status(ns, pod, containerStatuses=[waiting]) or True, "it is being created")
    eventually(lambda: ("", "events", "list") in used(kube), "the operator looks for the reason")

    # Objects that the endpoint no longer needs are deleted; changes by other clients are reverted.
    less = {"replicas": 1, "monitoring": {"podMonitor": "Disabled"}, "networkPolicy": {"mode": "None"}}
    kube.patch(ns, "all", less)
    for kind in ("poddisruptionbudgets", "podmonitors", "networkpolicies"):
        eventually(lambda kind=kind: is_gone(kube, paths[kind]), f"its {kind} are gone")
    right = port_names(kube, ns)
    spoil(kube, ns)
    eventually(lambda: port_names(kube, ns) == right, "what was spoilt is put right")
    kube.core.delete_node(node)
    assert replica.end() == 0  # watches appear in the audit log when they end

    used_rights = used(kube)
    assert sorted(used_rights - granted(helm)) == [], "requested and not granted"
    assert sorted(granted(helm) - used_rights - UNSEEN) == [], "granted and not requested"


def hopeless(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    """Create a Deployment like that of an operator that did not know yet that the model does not fit; it is removed."""
    large = {"model": {"source": "hf://meta-llama/Llama-3.1-70B-Instruct"}, "engine": {"image": "x"}}
    made = kube.create(ns, document("large", hardware={"accelerator": "nvidia-l4", "count": 1}, **large))
    planned = eventually(lambda: kube.condition(ns, "large", "Planned"), "its condition is reported")
    assert (planned["status"], planned["reason"]) == ("False", "DoesNotFit")
    owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": "large", "uid": made["metadata"]["uid"]}
    labels = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "large"}
    record = json.dumps({"spec": digest(parse(made).spec), "template": {}})
    metadata = {
        "name": "large",
        "labels": labels,
        "annotations": {ANNOTATION: record},
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": "x"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    kube.apps.create_namespaced_deployment(ns, {"metadata": metadata, "spec": spec})
    path = f"/apis/apps/v1/namespaces/{ns}/deployments/large"
    eventually(lambda: is_gone(kube, path), "it is removed")


def test_kubernetes_own_roles_hold_for_endpoints(kube: Any, ns: str, eventually: Any) -> None:
    rbac, authorization = client.RbacAuthorizationV1Api(kube.api), client.AuthorizationV1Api(kube.api)
    for role in ("view", "edit", "admin"):
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"a-{role}"}
        rbac.create_namespaced_role_binding(ns, {"metadata": {"name": role}, "roleRef": reference, "subjects": [user]})

    def may(role: str, verb: str, resource: str = "inferenceendpoints", namespace: str = ns) -> bool:
        resource, _, subresource = resource.partition("/")
        about = {"group": "stoker.dev", "resource": resource, "subresource": subresource, "verb": verb}
        review = {"spec": {"user": f"a-{role}", "resourceAttributes": {**about, "namespace": namespace}}}
        return bool(authorization.create_subject_access_review(review).status.allowed)

    for role in ("view", "edit", "admin"):
        eventually(lambda role=role: may(role, "list"), f"{role} is aggregated")
        assert may(role, "get", "inferenceendpoints/scale")
        assert not may(role, "list", namespace="default")
        assert not may(role, "patch", "inferenceendpoints/status")
        writes = role != "view"
        for verb in ("create", "update", "patch", "delete"):
            assert may(role, verb) is writes
        assert may(role, "patch", "inferenceendpoints/scale") is writes


def is_gone(kube: Any, path: str) -> bool:
    try:
        kube.get(path)
    except client.ApiException as error:
        return error.status == 404
    return False


def port_names(kube: Any, ns: str) -> list[str]:
    return [port.name for port in kube.core.read_namespaced_service("all", ns).spec.ports]


def spoil(kube: Any, ns: str) -> None:
    """Rename the Service's port."""
    kube.core.patch_namespaced_service("all", ns, {"spec": {"ports": [{"port": 8000, "name": "spoilt"}]}})
