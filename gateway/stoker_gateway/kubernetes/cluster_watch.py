"""Watches a cluster, and reports its model registry and keys whenever they change.

InferenceEndpoints, EndpointSlices, Secrets of clients' keys ─ a watch each ─┐
Secrets of servers' API keys ───────────────── read by name, periodically ───┴─► report, at most five times a second
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from prometheus_client import CollectorRegistry, Gauge

from stoker_gateway.errors import GatewayError
from stoker_gateway.keys.key_watch import KeyWatch
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.keys.manifests import LABEL
from stoker_gateway.kubernetes import build_registry, facts
from stoker_gateway.kubernetes.api import Api
from stoker_gateway.kubernetes.credentials import Credentials
from stoker_gateway.kubernetes.key_history import KeyHistory
from stoker_gateway.kubernetes.watch import Kind, Name, Watch
from stoker_gateway.registry.model_registry import ModelRegistry

#: Minimum interval of reports, in seconds.
PERIOD_S: Final = 0.2

_ENDPOINTS: Final = Kind(
    "InferenceEndpoints",
    "/apis/stoker.dev/v1alpha1/inferenceendpoints",
    remedy="; install Stoker's chart, which contains their definition",
)
#: Slices of the operator's Services, created by Kubernetes' controller, which follows the readiness of pods.
_SLICES: Final = Kind(
    "EndpointSlices",
    "/apis/discovery.k8s.io/v1/endpointslices",
    "app.kubernetes.io/managed-by=stoker,endpointslice.kubernetes.io/managed-by=endpointslice-controller.k8s.io",
)


class ClusterWatch:
    """Reports a cluster's models and keys. Runs in one event loop.

    Args:
        api: client of the API server.
        namespace: the gateway's namespace, which contains the clients' keys.
        registry: Prometheus registry.
        holds_external: whether to hold requests also for endpoints that another autoscaler scales.
    """

    def __init__(self, api: Api, namespace: str, registry: CollectorRegistry, *, holds_external: bool = False) -> None:
        self._holds_external = holds_external
        self._loop = asyncio.get_running_loop()
        self._updated = asyncio.Event()
        self._failure: asyncio.Future[NoReturn] = self._loop.create_future()
        self._stop = threading.Event()
        secrets = Kind("Secrets of keys", f"/api/v1/namespaces/{namespace}/secrets", f"{LABEL}=true")
        self._endpoints = Watch(api, _ENDPOINTS, facts.read_endpoint, self._changed)
        self._slices = Watch(api, _SLICES, facts.read_slice, self._changed)
        self._secrets = Watch(api, secrets, facts.read_key, self._changed)
        self._credentials = Credentials(api, self._changed)
        self._history = KeyHistory()
        self._key_watch = KeyWatch(f"namespace {namespace}")
        watches = self._endpoints, self._slices, self._secrets
        works: list[Callable[[], None]] = [lambda each=each: each.run(self._stop) for each in watches]  # type: ignore[misc]
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name="watching", daemon=True)
            for work in (*works, self._credentials.run)
        ]
        age_gauge(registry).set_function(lambda: max(each.age_s() for each in watches))

    async def watch(
        self, set_model_registry: Callable[[ModelRegistry], Awaitable[None]], set_keyring: Callable[[Keyring], None]
    ) -> NoReturn:
        """Watch forever. The first report follows when all kinds have been listed: the keys first, then the model
        registry.

        Raises:
            GatewayError: a watching thread failed with an unexpected error.
        """
        for thread in self._threads:
            thread.start()
        reporting = asyncio.ensure_future(self._report_changes(set_model_registry, set_keyring))
        try:
            done, _ = await asyncio.wait({reporting, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            raise AssertionError("both tasks end only with an exception")
        finally:
            reporting.cancel()
            self._stop.set()
            self._credentials.stop()

    async def _report_changes(
        self, set_model_registry: Callable[[ModelRegistry], Awaitable[None]], set_keyring: Callable[[Keyring], None]
    ) -> NoReturn:
        model_registry: ModelRegistry | None = None
        manifests: dict[Name, object] | None = None
        while True:
            await self._updated.wait()
            self._updated.clear()
            if not (self._endpoints.listed and self._slices.listed and self._secrets.listed):
                continue
            if (found := self._secrets.items()) != manifests:
                manifests = dict(found)
                set_keyring(await asyncio.to_thread(self._key_watch.keyring, [found[name] for name in sorted(found)]))
            new_registry = await asyncio.to_thread(self._make_registry)
            if new_registry != model_registry:
                model_registry = new_registry
                await set_model_registry(new_registry)
            await asyncio.sleep(PERIOD_S)

    def _make_registry(self) -> ModelRegistry:
        endpoints = self._endpoints.items().values()
        secrets: dict[Name, frozenset[tuple[str, int]]] = {}
        for each in endpoints:
            if each.secret is not None:
                name = (each.namespace, each.secret)
                secrets[name] = secrets.get(name, frozenset()) | {(each.name, each.generation)}
        self._credentials.set_secrets(secrets)
        self._history.keep((each.namespace, each.name) for each in endpoints)
        return build_registry.make(
            endpoints,
            self._slices.items().values(),
            self._credentials.keys(),
            self._history,
            holds_external=self._holds_external,
        )

    def _changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._updated.set)

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            failure = GatewayError(f"watching the cluster failed: {error!r}")
            failure.__cause__ = error
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail, failure)

    def _fail(self, failure: GatewayError) -> None:
        if not self._failure.done():
            self._failure.set_exception(failure)


def age_gauge(registry: CollectorRegistry) -> Gauge:
    """Register the metric that shows whether the model registry is current."""
    return Gauge(
        "stoker:gateway_directory_age_seconds",
        "Seconds for which changes in the cluster may have been missed; 0 while it is watched.",
        registry=registry,
    )
