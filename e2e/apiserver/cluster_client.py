"""Access to the API server for tests, and waiting for the effects of its controllers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from apiserver import ApiServer
from kit import waiting
from kubernetes import client, config

SYSTEM = "stoker-system"
GROUP, VERSION, PLURAL = "stoker.dev", "v1alpha1", "inferenceendpoints"
Object = dict[str, Any]


def wait_for(look: Callable[[], Any], description: str, timeout: float = waiting.HANGING_S) -> Any:
    """Wait until `look` returns something true, and return that; 404 errors count as nothing.

    A `timeout` below `waiting.HANGING_S` is raised to it.
    """

    def found() -> Any:
        try:
            return look()
        except client.ApiException as error:
            if error.status != 404:
                raise
            return None

    return waiting.wait_for(found, description, max(timeout, waiting.HANGING_S), every=0.1)


class Cluster:
    """The API server, with all rights."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.kubeconfig = kubeconfig = server.kubeconfig
        self.api = config.new_client_from_config(str(kubeconfig))
        self.core = client.CoreV1Api(self.api)
        self.apps = client.AppsV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.extensions = client.ApiextensionsV1Api(self.api)

    def get(self, path: str) -> Object:
        """Return an object as the API server stores it, including managedFields."""
        request = self.api.param_serialize("GET", path, header_params={"Accept": "application/json"})
        response = self.api.call_api(*request)
        text = response.read()
        if response.status >= 400:
            raise client.ApiException(status=response.status, reason=text)
        found: Object = json.loads(text)
        return found

    def endpoint(self, namespace: str, name: str) -> Object:
        """Return an InferenceEndpoint."""
        return self.get(f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}")

    def deployment(self, namespace: str, name: str) -> Object:
        """Return a Deployment."""
        return self.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")

    def condition(self, namespace: str, name: str, kind: str = "Ready") -> Object:
        """Return a condition of an endpoint; empty if it is missing or describes an older spec."""
        endpoint = self.endpoint(namespace, name)
        for each in endpoint.get("status", {}).get("conditions", ()):
            if each["type"] == kind and each["observedGeneration"] == endpoint["metadata"]["generation"]:
                found: Object = each
                return found
        return {}

    def create(self, namespace: str, document: Object, **options: Any) -> Object:
        """Create an InferenceEndpoint."""
        created: Object = self.custom.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, document, **options
        )
        return created

    def patch(self, namespace: str, name: str, spec: Object) -> None:
        """Change the spec of an endpoint; None removes a field."""
        self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, {"spec": spec}, _content_type="application/merge-patch+json"
        )

    def delete(self, namespace: str, name: str) -> None:
        """Delete an endpoint."""
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)

    def pods(self, namespace: str, name: str) -> list[Any]:
        """Return the pods of an endpoint that are not being deleted."""
        selector = f"app.kubernetes.io/instance={name}"
        items = self.core.list_namespaced_pod(namespace, label_selector=selector).items
        return [pod for pod in items if pod.metadata.deletion_timestamp is None]

    def set_pod_status(self, namespace: str, pod: str, **status: Any) -> None:
        """Set a pod's status, as a kubelet would."""
        self.core.patch_namespaced_pod_status(pod, namespace, {"status": status})

    def mark_ready(self, namespace: str, pod: str) -> None:
        """Mark a pod as ready."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        self.set_pod_status(namespace, pod, phase="Running", conditions=[ready])

    def writes(self, namespace: str) -> dict[str, int]:
        """Return the number of writes per resource in a namespace so far, including writes without effect."""
        counts: dict[str, int] = {}
        for event in self.server.requests():
            about = event.get("objectRef", {})
            if event["verb"] in ("create", "update", "patch", "delete") and about.get("namespace") == namespace:
                counts[about["resource"]] = counts.get(about["resource"], 0) + 1
        return counts
