"""The gateway's view of a cluster, with a real API server that expires resource versions and restarts, and whose
controllers create the EndpointSlices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from apiserver import ApiServer
from kit.waiting import wait_for, wait_for_async
from kubernetes import client, config
from prometheus_client import CollectorRegistry

from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, digest_of
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.kubernetes.api import Api
from stoker_gateway.kubernetes.cluster_watch import ClusterWatch
from stoker_gateway.registry.model_registry import ModelRegistry

ROOT = Path(__file__).parents[2]
GROUP, VERSION, PLURAL = "stoker.dev", "v1alpha1", "inferenceendpoints"
NAMESPACE, KEYS = "models", "gate"
LABELS = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "a"}

Object = dict[str, Any]


@pytest.fixture(scope="module")
def own_server() -> Iterator[ApiServer]:
    """An API server with the CRD, which tests may restart."""
    with ApiServer() as server:
        api = config.new_client_from_config(str(server.kubeconfig))
        definition = yaml.safe_load((ROOT / "crds" / f"{PLURAL}.{GROUP}.yaml").read_text())
        client.ApiextensionsV1Api(api).create_custom_resource_definition(definition)
        for name in (NAMESPACE, KEYS):
            client.CoreV1Api(api).create_namespace({"metadata": {"name": name}})
        client.CoreV1Api(api).create_node({"metadata": {"name": "node"}})  # slices omit pods without a node
        yield server


class Admin:
    """Changes the cluster."""

    def __init__(self, server: ApiServer) -> None:
        api = config.new_client_from_config(str(server.kubeconfig))
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)

    def endpoint(self, name: str, **spec: Any) -> None:
        """Create an endpoint, with the operator's status that admits it."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "InferenceEndpoint",
            "metadata": {"name": name},
            "spec": {"model": {"source": f"hf://org/{name}"}, "hardware": {"accelerator": "cpu"}, **spec},
        }

        def created() -> bool:
            try:
                self.custom.create_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL, body)
            except client.ApiException as error:
                if error.status != 404:  # the definition is not served yet
                    raise
                return False
            return True

        wait_for(created, "endpoints are served", 120, every=0.2)
        self.status(name, [{"name": "gateway", "url": "http://gateway/v1"}])

    def status(self, name: str, addresses: list[Object]) -> None:
        """Set an endpoint's addresses."""
        self.custom.patch_namespaced_custom_object_status(
            GROUP,
            VERSION,
            NAMESPACE,
            PLURAL,
            name,
            {"status": {"addresses": addresses}},
            _content_type="application/merge-patch+json",
        )

    def pod(self, name: str, ip: str, *, ready: bool = True) -> None:
        """Create a pod of endpoint a, or set its readiness."""
        if not any(each.metadata.name == name for each in self.core.list_namespaced_pod(NAMESPACE).items):
            container = {"name": "engine", "image": "none", "ports": [{"name": "http", "containerPort": 8000}]}
            spec = {"nodeName": "node", "automountServiceAccountToken": False, "containers": [container]}
            self.core.create_namespaced_pod(NAMESPACE, {"metadata": {"name": name, "labels": LABELS}, "spec": spec})
        condition = {"type": "Ready", "status": str(ready)}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
        self.core.patch_namespaced_pod_status(name, NAMESPACE, {"status": status})

    def key(self, name: str) -> None:
        """Create a client's key."""
        self.core.create_namespaced_secret(KEYS, manifests.write(Key(name, digest_of(name))))


class ReceivedState:
    """Records the state that the gateway received last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.directory, self.keyring, self.registry = ModelRegistry(), Keyring(), registry

    async def take(self, directory: ModelRegistry) -> None:
        """Receive a new model registry."""
        self.directory = directory

    def set_keyring(self, keyring: Keyring) -> None:
        """Receive new keys."""
        self.keyring = keyring

    def servers(self, name: str) -> tuple[str, ...] | None:
        """Return the servers of a model; None if it is unknown."""
        endpoint = self.directory.endpoints.get(name)
        return None if endpoint is None else endpoint.servers

    @property
    def age_s(self) -> float:
        """Return the age of the state as in the metric, in seconds."""
        age = self.registry.get_sample_value("stoker:gateway_directory_age_seconds")
        assert age is not None
        return age


def killed(server: ApiServer) -> Callable[[], None]:
    """Kill the API server but keep its data; return a function that restarts it."""
    process = server.processes["kube-apiserver"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    def start_again() -> None:
        quiet = subprocess.DEVNULL
        restarted = subprocess.Popen(process.args, stdout=quiet, stderr=quiet, start_new_session=True)
        server.processes["kube-apiserver"] = restarted
        reached = config.new_client_from_config(str(server.kubeconfig))

        def answers() -> bool:
            try:
                client.VersionApi(reached).get_code()
            except (client.ApiException, urllib3.exceptions.HTTPError):
                return False
            return True

        wait_for(answers, "the API server comes back", 120, every=0.2)

    return start_again


@asynccontextmanager
async def watching(server: ApiServer) -> AsyncIterator[ReceivedState]:
    received = ReceivedState(CollectorRegistry())
    watch = ClusterWatch(Api(config.new_client_from_config(str(server.kubeconfig))), KEYS, received.registry)
    task = asyncio.create_task(watch.watch(received.take, received.set_keyring))
    try:
        yield received
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool], description: str) -> None:
    await wait_for_async(holds, description, 120)


def test_gateway_follows_the_cluster_across_api_server_failures(own_server: ApiServer) -> None:
    admin = Admin(own_server)

    async def run() -> None:
        async with watching(own_server) as received:
            await asyncio.to_thread(admin.endpoint, "a", auth={"apiKeysSecretRef": {"name": "s"}})
            await until(lambda: received.servers("org/a") == (), "the endpoint is known")
            assert received.directory.endpoints["org/a"].refusal is not None
            secret = {"metadata": {"name": "s"}, "stringData": {"alice": "k1\nk2"}}
            await asyncio.to_thread(admin.core.create_namespaced_secret, NAMESPACE, secret)
            ports = [{"name": "http", "port": 80, "targetPort": "http"}]
            body = {"metadata": {"name": "a", "labels": LABELS}, "spec": {"selector": LABELS, "ports": ports}}
            await asyncio.to_thread(admin.core.create_namespaced_service, NAMESPACE, body)
            await asyncio.to_thread(admin.pod, "p1", "10.1.0.1")
            await asyncio.to_thread(admin.pod, "p2", "10.1.0.2", ready=False)
            await until(lambda: received.servers("org/a") == ("10.1.0.1:8000",), "a pod that is ready")
            await until(lambda: received.directory.endpoints["org/a"].authorization == "Bearer k1", "its servers' key")
            assert received.directory.endpoints["org/a"].refusal is None

            await asyncio.to_thread(admin.key, "one")
            await until(lambda: list(received.keyring.keys) == ["one"], "a key in force")
            await asyncio.to_thread(admin.pod, "p2", "10.1.0.2")
            await until(lambda: received.servers("org/a") == ("10.1.0.1:8000", "10.1.0.2:8000"), "both pods")

            start_again = await asyncio.to_thread(killed, own_server)
            await until(lambda: received.age_s > 0, "the loss of the API server")
            assert received.servers("org/a") == ("10.1.0.1:8000", "10.1.0.2:8000")
            await asyncio.to_thread(start_again)
            await until(lambda: received.age_s == 0, "the API server is watched again")
            await asyncio.to_thread(admin.core.delete_namespaced_secret, "stoker-key-one", KEYS)
            await until(lambda: not received.keyring.keys, "a key revoked")
            await asyncio.to_thread(admin.endpoint, "b", routing={"sessionHeader": "X-Session"})
            await until(lambda: received.servers("org/b") == (), "another endpoint")
            assert received.directory.endpoints["org/b"].session_header == "x-session"
            await asyncio.to_thread(admin.status, "a", [])
            await until(lambda: received.servers("org/a") is None, "an endpoint that is no longer admitted")

    asyncio.run(run())
