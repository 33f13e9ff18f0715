"""The gateway's routes to endpoints, and per namespace a task that grants it access to the endpoints' API keys."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Set

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.manager.endpoint_tasks import EndpointTasks
from stoker_operator.objects.facts import Key
from stoker_operator.reconcile.apply import Writer
from stoker_operator.reconcile.gateway_rbac import grant, namespaces
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.reconcile.routing import Route, Routes
from stoker_operator.settings import Settings


class GatewayRoutes:
    """The gateway's routes, and its access to API keys.

    Args:
        settings: the operator's settings.
        kube: the API server's client.
        store: the watched objects.
        writer: returns a writer for this replica's current term as the leader.
        is_working: returns whether tasks may be woken now.
        operators: finds out which operator serves a namespace.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        store: Store,
        writer: Callable[[], Writer],
        is_working: Callable[[], bool],
        operators: OtherOperators,
    ) -> None:
        self._gateway = settings.gateway
        self._kube = kube
        self._store = store
        self._writer = writer
        self._is_working = is_working
        self._operators = operators
        self._routes = Routes(settings.gateway)
        self._grants = EndpointTasks(self._grant, settings)

    def of(self, key: Key) -> Route | None:
        """Return the endpoint's route, or None if the endpoint is unknown, or needs no gateway and there is none."""
        return self._routes.of(key)

    def update(self, keys: Set[Key]) -> set[Key]:
        """Update the routes of these endpoints. Return them, and all others whose route may have changed."""
        changed: set[Key] = set()
        for key in keys:
            document, namespace = self._store.get(KIND, *key), self._store.get("Namespace", "", key.namespace)
            changed |= self._routes.learn(key, document, namespace)
        for namespace_name in {key.namespace for key in changed}:
            self.wake(namespace_name)
        return {*keys, *changed}

    def wake(self, namespace: str) -> None:
        """Wake the task that updates the gateway's access to API keys in a namespace."""
        if self._gateway and self._is_working():
            self._grants.wake(Key(namespace, ""))

    def wake_all(self, endpoints: Iterable[Key]) -> None:
        """Call `wake` for the namespaces of these endpoints, and for namespaces that have a grant."""
        for namespace in {key.namespace for key in endpoints} | namespaces(self._store):
            self.wake(namespace)

    async def stop(self) -> None:
        """End the tasks; they may be woken again afterwards."""
        await self._grants.stop()

    async def _grant(self, key: Key) -> Outcome:
        """Grant the gateway access to exactly the Secrets that it needs in a namespace."""
        if self._gateway is None:
            return Outcome.GONE
        secrets = self._routes.secrets(key.namespace)
        work = functools.partial(grant, self._kube, self._store, self._writer(), key.namespace, secrets, self._gateway)
        outcome = await asyncio.to_thread(work, self._operators)
        if outcome is Outcome.GONE:
            self._operators.forget(key)
        return outcome
