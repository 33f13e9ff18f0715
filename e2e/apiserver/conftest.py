"""The operator against a real API server and its controllers, without nodes: pods exist and never run."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml
from apiserver import ApiServer, free_ports
from kit import waiting
from kubernetes import client, config
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
SYSTEM = "stoker-system"
GROUP, VERSION, PLURAL = "stoker.dev", "v1alpha1", "inferenceendpoints"

Object = dict[str, Any]


def wait_for(look: Callable[[], Any], description: str, timeout: float = waiting.HANGING_S) -> Any:
    """What `look` returns as soon as that is something; errors of objects that are not there yet do not count."""

    def found() -> Any:
        try:
            return look()
        except client.ApiException as error:
            if error.status != 404:
                raise
            return None

    return waiting.wait_for(found, description, max(timeout, waiting.HANGING_S), every=0.1)


class Cluster:
    """The API server, as a user with all rights sees it."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.kubeconfig = kubeconfig = server.kubeconfig
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
        found: Object = json.loads(text)
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

    def writes(self, namespace: str) -> dict[str, int]:
        """How often the operator has sent a change of each kind of object in a namespace so far, whether that changed
        anything or not."""
        counts: dict[str, int] = {}
        for event in self.server.requests():
            about = event.get("objectRef", {})
            if event["verb"] in ("create", "update", "patch", "delete") and about.get("namespace") == namespace:
                counts[about["resource"]] = counts.get(about["resource"], 0) + 1
        return counts


@pytest.fixture(scope="session")
def helm() -> str:
    """Where helm is; it is built if need be."""
    built = subprocess.run([ROOT / "e2e/cluster/build", "helm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip()


@pytest.fixture(scope="session")
def kube(apiserver: ApiServer, helm: str) -> Cluster:
    """The API server with the chart installed; its operator's pod never runs, for want of a node."""
    command = [helm, "install", "stoker", ROOT / "charts/stoker", f"--namespace={SYSTEM}", "--create-namespace"]
    subprocess.run(command, env={**os.environ, "KUBECONFIG": str(apiserver.kubeconfig)}, check=True)
    cluster = Cluster(apiserver)
    # The webhook's Service leads to no pod here. A test that wants it called says so, and where it listens.
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
    """What others publish with their Go modules, as documents: ``foreign(MODULE, VERSION, "crds/a.yaml", ...)``."""

    def documents(module: str, version: str, *files: str) -> list[Object]:
        command = ["go", "mod", "download", "-json", f"{module}@{version}"]
        # Outside of any module of ours; what was downloaded once lies in Go's own cache.
        done = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
        folder = Path(json.loads(done.stdout)["Dir"])
        return [each for file in files for each in yaml.safe_load_all((folder / file).read_text()) if each]

    return documents


@pytest.fixture
def define(kube: Cluster) -> Iterator[Callable[[list[Object]], None]]:
    """Defines kinds of others until the end of the test."""
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
    """Adds PodMonitors to the API server, as the Prometheus operator defines them."""
    file = "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"
    return lambda: define(foreign("github.com/prometheus-operator/prometheus-operator", "v0.85.0", file))


@pytest.fixture
def pod_monitors(define_pod_monitors: Callable[[], None]) -> None:
    """The API server has PodMonitors."""
    define_pod_monitors()


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


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of what is answered on a port of this machine; 0 where nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ConnectionError):
            raise  # it is there, and slow
        return 0, ""


class Operator:
    """``stoker operator`` as a process of its own. As a context manager it runs until the end of the block, and what it
    logged must then report no bug and nothing forbidden.

    Args:
        kubeconfig: the cluster, and who it is there.
        log: what it says is added to this file.
        options: more words of its command line.
    """

    def __init__(self, kubeconfig: Path, log: Path, *options: str) -> None:
        self.kubeconfig, self.log, self.options = kubeconfig, log, options
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.process: subprocess.Popen[bytes] | None = None
        self.health = 0

    def __enter__(self) -> Operator:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self.stop()
        check_log(self.log)
        assert code == 0, self.log.read_text()

    def start(self) -> None:
        """Starts it, if it does not run, and waits until it is ready: what tests wait for begins then."""
        if self.process is None:
            (self.health,) = free_ports(1)
            address = f"--health-address=127.0.0.1:{self.health}"
            command = [sys.executable, "-m", "stoker", "operator", address, *self.options]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            try:
                wait_for(self._is_ready, "the operator is ready", timeout=120)
            except BaseException:
                self.process.kill()
                self.process.wait()
                self.process = None
                raise

    def _is_ready(self) -> bool:
        assert self.process and self.process.poll() is None, self.log.read_text()
        return get(self.health, "/readyz")[0] == 200

    def reconciles(self) -> float:
        """How often it has looked at an endpoint since it was started."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(get(self.health, "/metrics")[1])
            for sample in family.samples
            if sample.name == "stoker_operator_reconciles_total"
        )

    def stop(self) -> int:
        """Asks it to end, if it runs, as Kubernetes does; its exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=120)
        self.process = None
        return code


@pytest.fixture(scope="session")
def sleeping_operator(operators_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator, which runs when a test wants it to. What it logged must report no bug and nothing forbidden."""
    operator = Operator(operators_kubeconfig, tmp_path_factory.mktemp("operator") / "log")
    yield operator
    operator.stop()
    if operator.log.exists():
        check_log(operator.log)


@pytest.fixture
def operator(sleeping_operator: Operator) -> Operator:
    """The operator, running with the chart's rights. A test that stops it need not start it again."""
    sleeping_operator.start()
    return sleeping_operator


def check_log(log: Path) -> None:
    """What an operator logged reports no bug and nothing forbidden."""
    logged = log.read_text()
    assert "Traceback" not in logged, f"{log}: {logged}"
    assert '" cannot ' not in logged, (
        f"{log}: {logged}"
    )  # as in: User "system:serviceaccount:..." cannot patch resource


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


class Replica:
    """A replica as a process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.health, self.webhook = free_ports(2)
        self.log, self.is_leaving = log, False
        command = [
            sys.executable, "-m", "stoker", "operator",
            f"--operator-namespace={SYSTEM}", "--leader-elect", "--lease-name=stoker",
            f"--health-address=127.0.0.1:{self.health}",
            f"--webhook-address=127.0.0.1:{self.webhook}", "--webhook-secret=stoker-webhook",
            "--webhook-configuration=stoker", "--webhook-host=127.0.0.1", "--log-format=json",
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text; 0 where nothing answers."""
        return get(self.health, path)

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def leads(self) -> bool:
        return "\nstoker_operator_leader 1.0\n" in self.get("/metrics")[1]

    def review(self, authorities: str, review: Any) -> Any:
        """Its answer to an AdmissionReview that is sent as the API server would send it."""
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authorities))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
        with opener.open(f"https://127.0.0.1:{self.webhook}/validate", json.dumps(review).encode(), 30) as answer:
            return json.load(answer)

    def leave(self) -> None:
        """Tells it to end, as Kubernetes does: once. It answers reviews some seconds more."""
        if not self.is_leaving:
            self.is_leaving = True
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Ends as by Kubernetes; its exit code."""
        self.leave()
        return self.process.wait(timeout=60)

    def check(self) -> None:
        """What it logged is in order, line by line."""
        check_log(self.log)
        assert all(json.loads(line)["message"] for line in self.log.read_text().strip("\n").split("\n"))


@pytest.fixture(scope="session")
def leaving() -> Iterator[list[Replica]]:
    """Replicas that got SIGTERM. They answer reviews some seconds more, for which no test waits."""
    replicas: list[Replica] = []
    yield replicas
    for replica in replicas:
        assert replica.process.wait(timeout=60) == 0, replica.log
        replica.check()


@pytest.fixture
def start(
    sleeping_operator: Operator, leaving: list[Replica], tmp_path: Path, eventually: Any
) -> Iterator[Callable[[], Replica]]:
    """Starts a replica and waits until it is ready. What they log must report no bug and nothing forbidden."""
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
    """The chart's ValidatingWebhookConfiguration; left as it was."""
    admission = client.AdmissionregistrationV1Api(kube.api)

    class Configuration:
        def call(self, replica: Any) -> None:
            """Lets the API server send reviews to this replica, with a long timeout, so that a slow answer counts."""
            bundle = eventually(self.bundle, "the operator says whom to trust")
            url = {"url": f"https://127.0.0.1:{replica.webhook}/validate", "caBundle": bundle}
            change = [
                {"op": "replace", "path": "/webhooks/0/clientConfig", "value": url},
                {"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 30},
            ]
            admission.patch_validating_webhook_configuration("stoker", change)

        def forget(self) -> None:
            """Trusts nobody."""
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
