"""The operator against a real API server and its controllers, without nodes: pods exist and never run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

ROOT = Path(__file__).parents[2]
SYSTEM = "stoker-system"
GROUP, VERSION, PLURAL = "stoker.dev", "v1alpha1", "inferenceendpoints"

Object = dict[str, Any]


def wait_for(look: Callable[[], Any], what: str, timeout: float = 30) -> Any:
    """What `look` returns as soon as that is something; errors of objects that are not there yet do not count."""
    deadline = time.monotonic() + timeout
    found: Any = None
    while time.monotonic() < deadline:
        try:
            found = look()
        except client.ApiException as error:
            if error.status != 404:
                raise
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout:.0f} s: {what}; last seen: {found!r}")


class Cluster:
    """The API server, as a user with all rights sees it."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.api = config.new_client_from_config(str(kubeconfig))
        self.core = client.CoreV1Api(self.api)
        self.apps = client.AppsV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.extensions = client.ApiextensionsV1Api(self.api)

    def get(self, path: str) -> Object:
        """An object as the API server writes it; managedFields and all."""
        request = self.api.param_serialize("GET", path, header_params={"Accept": "application/json"})
        response = self.api.call_api(*request)
        text = response.read()
        if response.status >= 400:
            raise client.ApiException(status=response.status, reason=text)
        found: Object = yaml.safe_load(text)
        return found

    def endpoint(self, namespace: str, name: str) -> Object:
        """An InferenceEndpoint."""
        return self.get(f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}")

    def deployment(self, namespace: str, name: str) -> Object:
        """A Deployment."""
        return self.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")

    def condition(self, namespace: str, name: str, kind: str = "Ready") -> Object:
        """A condition of an endpoint; empty where it is not reported, or about an older spec."""
        endpoint = self.endpoint(namespace, name)
        for each in endpoint.get("status", {}).get("conditions", ()):
            if each["type"] == kind and each["observedGeneration"] == endpoint["metadata"]["generation"]:
                found: Object = each
                return found
        return {}

    def create(self, namespace: str, document: Object, **options: Any) -> Object:
        """Creates an InferenceEndpoint."""
        created: Object = self.custom.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, document, **options
        )
        return created

    def patch(self, namespace: str, name: str, spec: Object) -> None:
        """Changes the spec of an endpoint; None removes a field."""
        self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, {"spec": spec}, _content_type="application/merge-patch+json"
        )

    def delete(self, namespace: str, name: str) -> None:
        """Deletes an endpoint."""
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)

    def pods(self, namespace: str, name: str) -> list[Any]:
        """The pods of an endpoint that are there to stay."""
        selector = f"app.kubernetes.io/instance={name}"
        items = self.core.list_namespaced_pod(namespace, label_selector=selector).items
        return [pod for pod in items if pod.metadata.deletion_timestamp is None]

    def set_pod_status(self, namespace: str, pod: str, **status: Any) -> None:
        """Reports of a pod what a kubelet would."""
        self.core.patch_namespaced_pod_status(pod, namespace, {"status": status})

    def mark_ready(self, namespace: str, pod: str) -> None:
        """Reports that a pod serves."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        self.set_pod_status(namespace, pod, phase="Running", conditions=[ready])

    def writes(self) -> dict[str, int]:
        """How often each kind that the operator writes has been written by server-side apply so far, whether the
        request changed anything or not."""
        request = self.api.param_serialize("GET", "/metrics")
        text = self.api.call_api(*request).read().decode()
        counts: dict[str, int] = {}
        for labels, value in re.findall(r'^apiserver_request_total{([^}]*verb="APPLY"[^}]*)} (\d+)', text, re.M):
            resource = re.search(r'resource="([^"]*)"', labels)
            if resource and resource[1] in (PLURAL, "deployments", "services", "serviceaccounts"):
                counts[resource[1]] = counts.get(resource[1], 0) + int(value)
        return counts


@pytest.fixture(scope="session")
def helm() -> str:
    """Where helm is; it is built if need be."""
    built = subprocess.run([ROOT / "e2e/cluster/build", "helm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip()


@pytest.fixture(scope="session")
def kube(apiserver: Any, helm: str) -> Cluster:
    """The API server with the chart installed; its operator's pod never runs, for want of a node."""
    command = [helm, "install", "stoker", ROOT / "charts/stoker", f"--namespace={SYSTEM}", "--create-namespace"]
    subprocess.run(command, env={**os.environ, "KUBECONFIG": str(apiserver.kubeconfig)}, check=True)
    cluster = Cluster(apiserver.kubeconfig)

    def established() -> bool:
        crd = cluster.extensions.read_custom_resource_definition(f"{PLURAL}.{GROUP}")
        conditions = {each.type: each.status for each in (crd.status and crd.status.conditions) or ()}
        return conditions.get("Established") == "True"

    wait_for(established, "the definition is established")
    wait_for(lambda: cluster.get(f"/apis/{GROUP}/{VERSION}"), "the resource is served")
    return cluster


@pytest.fixture(scope="session")
def operators_kubeconfig(kube: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of the chart's service account, which may do what the chart's role says and no more."""
    token = kube.core.create_namespaced_service_account_token("stoker", SYSTEM, {"spec": {"expirationSeconds": 7200}})
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]]
    path = tmp_path_factory.mktemp("kubeconfig") / "operator.conf"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def ns(kube: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube.core.create_namespace({"metadata": {"name": name}})
    yield name
    kube.core.delete_namespace(name)


class Operator:
    """``stoker operator`` as a process of its own."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.log = log
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and returns at once."""
        command = [sys.executable, "-m", "stoker", "operator", "--health-address=127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def stop(self) -> int:
        """Asks it to end, as Kubernetes does; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=20)
        self.process = None
        return code


@pytest.fixture(scope="session")
def operator(operators_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator, running with the chart's rights. What it logged must tell of no bug and of nothing forbidden."""
    running = Operator(operators_kubeconfig, tmp_path_factory.mktemp("operator") / "log")
    running.start()
    yield running
    if running.process:
        running.stop()
    log = running.log.read_text()
    assert "Traceback" not in log, log
    assert '" cannot ' not in log, log  # as in: User "system:serviceaccount:..." cannot patch resource


@pytest.fixture
def document() -> Callable[..., Object]:
    """A manifest with the given parts of its spec: ``document(replicas=2)``."""

    def make(name: str = "demo", **spec: Any) -> Object:
        minimal = {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "InferenceEndpoint",
            "metadata": {"name": name},
            "spec": {**minimal, **spec},
        }

    return make


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """`wait_for`."""
    return wait_for
