"""The operator with a real API server and its controllers, without nodes: pods are created and never run."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer
from kubernetes import client

from .cluster_client import GROUP, PLURAL, SYSTEM, VERSION, Cluster, Object, wait_for
from .operator_process import Operator, Replica, check_log

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def helm() -> str:
    """Path of helm, which is built if necessary."""
    built = subprocess.run([ROOT / "e2e/cluster/build", "helm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip()


@pytest.fixture(scope="session")
def kube(apiserver: ApiServer, helm: str) -> Cluster:
    """The API server with the chart installed; the chart's operator pod never runs, because there is no node."""
    command = [helm, "install", "stoker", ROOT / "charts/stoker", f"--namespace={SYSTEM}", "--create-namespace"]
    subprocess.run(command, env={**os.environ, "KUBECONFIG": str(apiserver.kubeconfig)}, check=True)
    cluster = Cluster(apiserver)
    # The webhook's Service has no endpoints. Tests of the webhook label their namespace and set its address.
    selector = {"op": "add", "path": "/webhooks/0/namespaceSelector", "value": {"matchLabels": {"webhook": "called"}}}
    client.AdmissionregistrationV1Api(cluster.api).patch_validating_webhook_configuration("stoker", [selector])

    def established() -> bool:
        crd = cluster.extensions.read_custom_resource_definition(f"{PLURAL}.{GROUP}")
        conditions = {each.type: each.status for each in (crd.status and crd.status.conditions) or ()}
        return conditions.get("Established") == "True"

    wait_for(established, "the definition is established")
    wait_for(lambda: cluster.get(f"/apis/{GROUP}/{VERSION}"), "the resource is served")
    return cluster


@pytest.fixture(scope="session")
def foreign() -> Callable[..., list[Object]]:
    """Read documents from other projects' Go modules: ``foreign(MODULE, VERSION, "crds/a.yaml", ...)``."""

    def documents(module: str, version: str, *files: str) -> list[Object]:
        command = ["go", "mod", "download", "-json", f"{module}@{version}"]
        # `cwd` is outside any Go module; downloads stay in Go's cache.
        done = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
        folder = Path(json.loads(done.stdout)["Dir"])
        return [each for file in files for each in yaml.safe_load_all((folder / file).read_text()) if each]

    return documents


@pytest.fixture
def define(kube: Cluster) -> Iterator[Callable[[list[Object]], None]]:
    """Define other projects' kinds until the end of the test."""
    defined: set[str] = set()

    def make(definitions: list[Object]) -> None:
        for each in definitions:
            defined.add(each["metadata"]["name"])
            kube.extensions.create_custom_resource_definition(each)
        for name in defined:
            wait_for(lambda name=name: served(name), f"{name} is served")

    def served(name: str) -> Any:
        crd = kube.extensions.read_custom_resource_definition(name)
        return kube.get(f"/apis/{crd.spec.group}/{crd.spec.versions[0].name}/{crd.spec.names.plural}")

    def are_removed() -> bool:
        there = {each.metadata.name for each in kube.extensions.list_custom_resource_definition().items}
        return not there & defined

    yield make
    for name in defined:
        kube.extensions.delete_custom_resource_definition(name)
    wait_for(are_removed, "the definitions are gone")


@pytest.fixture
def define_pod_monitors(
    foreign: Callable[..., list[Object]], define: Callable[[list[Object]], None]
) -> Callable[[], None]:
    """Define PodMonitors as the Prometheus operator does."""
    file = "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"
    return lambda: define(foreign("github.com/prometheus-operator/prometheus-operator", "v0.85.0", file))


@pytest.fixture
def pod_monitors(define_pod_monitors: Callable[[], None]) -> None:
    """Make the API server serve PodMonitors."""
    define_pod_monitors()


@pytest.fixture(scope="session")
def operators_kubeconfig(kube: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of the chart's service account, with exactly the rights of the chart's role."""
    token = kube.core.create_namespaced_service_account_token("stoker", SYSTEM, {"spec": {"expirationSeconds": 7200}})
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]]
    path = tmp_path_factory.mktemp("kubeconfig") / "operator.conf"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def ns(kube: Cluster) -> Iterator[str]:
    """A namespace of the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube.core.create_namespace({"metadata": {"name": name}})
    yield name
    kube.core.delete_namespace(name)


@pytest.fixture(scope="session")
def sleeping_operator(operators_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator, not started. Its log must contain no tracebacks and no denied requests."""
    operator = Operator(operators_kubeconfig, tmp_path_factory.mktemp("operator") / "log")
    yield operator
    operator.stop()
    if operator.log.exists():
        check_log(operator.log)


@pytest.fixture
def operator(sleeping_operator: Operator) -> Operator:
    """The operator, running with the chart's rights. A test that stops it need not restart it."""
    sleeping_operator.start()
    return sleeping_operator


@pytest.fixture
def document() -> Callable[..., Object]:
    """Return a manifest with the given parts of its spec: ``document(replicas=2)``."""

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


@pytest.fixture(scope="session")
def leaving() -> Iterator[list[Replica]]:
    """Replicas that got SIGTERM. They serve reviews for some more seconds, for which tests do not wait."""
    replicas: list[Replica] = []
    yield replicas
    for replica in replicas:
        assert replica.process.wait(timeout=60) == 0, replica.log
        replica.check()


@pytest.fixture
def start(
    sleeping_operator: Operator, leaving: list[Replica], tmp_path: Path, eventually: Any
) -> Iterator[Callable[[], Replica]]:
    """Start a replica and wait until it is ready. Its log must contain no tracebacks and no denied requests."""
    sleeping_operator.stop()
    replicas: list[Replica] = []

    def one_more() -> Replica:
        replica = Replica(sleeping_operator.environment, tmp_path / f"{len(replicas)}.log")
        replicas.append(replica)
        try:
            eventually(replica.ready, "the replica is ready", timeout=120)
        except AssertionError:
            print(replica.log.read_text())
            raise
        return replica

    yield one_more
    running = [replica for replica in replicas if replica.process.poll() is None]
    for replica in running:
        replica.leave()
    for replica in running:
        eventually(lambda replica=replica: not replica.leads(), "it has left the work to others")
    leaving += running
    for replica in replicas:
        if replica not in running:
            replica.check()


@pytest.fixture
def configuration(kube: Cluster, eventually: Any) -> Iterator[Any]:
    """The chart's ValidatingWebhookConfiguration, restored at the end."""
    admission = client.AdmissionregistrationV1Api(kube.api)

    class Configuration:
        def call(self, replica: Any) -> None:
            """Make the API server send reviews to this replica, with a long timeout, so that slow responses count."""
            bundle = eventually(self.bundle, "the webhook has a CA bundle")
            url = {"url": f"https://127.0.0.1:{replica.webhook}/validate", "caBundle": bundle}
            change = [
                {"op": "replace", "path": "/webhooks/0/clientConfig", "value": url},
                {"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 30},
            ]
            admission.patch_validating_webhook_configuration("stoker", change)

        def forget(self) -> None:
            """Remove the CA bundle."""
            if self.bundle():
                change = [{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]
                admission.patch_validating_webhook_configuration("stoker", change)

        def bundle(self) -> Any:
            return admission.read_validating_webhook_configuration("stoker").webhooks[0].client_config.ca_bundle

    before = admission.read_validating_webhook_configuration("stoker").webhooks[0]
    service = before.client_config.service.to_dict()
    webhook_configuration = Configuration()
    yield webhook_configuration
    restored = {"service": service} | (
        {"caBundle": webhook_configuration.bundle()} if webhook_configuration.bundle() else {}
    )
    change = [
        {"op": "replace", "path": "/webhooks/0/clientConfig", "value": restored},
        {"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": before.timeout_seconds},
    ]
    admission.patch_validating_webhook_configuration("stoker", change)
