"""Which endpoints the gateway serves, and one task a namespace, which lets the gateway read the keys of these."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Set

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.manager.endpoint_tasks import EndpointTasks
from stoker_operator.manager.reconciler import lead_writer
from stoker_operator.objects.facts import Key
from stoker_operator.reconcile.gateway_rbac import grant, namespaces
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.reconcile.routing import Route, Routes
from stoker_operator.settings import Settings


class GatewayRoutes:
    """The gateway's part.

    Args:
        settings: how the operator runs; they name the gateway.
        kube: the cluster.
        store: what has been seen of it.
        epoch: the number of the lead in which this replica may write; None: it may not.
        is_working: whether tasks are woken now.
        operators: what is known of other operators.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        store: Store,
        epoch: Callable[[], int | None],
        is_working: Callable[[], bool],
        operators: OtherOperators,
    ) -> None:
        self._gateway = settings.gateway
        self._kube = kube
        self._store = store
        self._epoch = epoch
        self._is_working = is_working
        self._operators = operators
        self._routes = Routes(settings.gateway)
        self._grants = EndpointTasks(self._grant, settings)

    def of(self, key: Key) -> Route | None:
        """The endpoint's route; None where there is nothing to say."""
        return self._routes.of(key)

    def update(self, keys: Set[Key]) -> set[Key]:
        """Looks again at which of these the gateway serves; returns them, with the others for which that changes
        something."""
        changed: set[Key] = set()
        for key in keys:
            document, namespace = self._store.get(KIND, *key), self._store.get("Namespace", "", key.namespace)
            changed |= self._routes.learn(key, document, namespace)
        for namespace_name in {key.namespace for key in changed}:
            self.wake(namespace_name)
        return {*keys, *changed}

    def wake(self, namespace: str) -> None:
        """What the gateway may read in a namespace may have to change."""
        if self._gateway and self._is_working():
            self._grants.wake(Key(namespace, ""))

    def wake_all(self, endpoints: Iterable[Key]) -> None:
        """As `wake`, of the namespaces of these endpoints, and of those in which something was granted."""
        for namespace in {key.namespace for key in endpoints} | namespaces(self._store):
            self.wake(namespace)

    async def stop(self) -> None:
        """Ends the tasks; they may be woken again after."""
        await self._grants.stop()

    async def _grant(self, key: Key) -> Outcome:
        """Lets the gateway read what it needs in a namespace, and no more."""
        if self._gateway is None:
            return Outcome.GONE
        writer = lead_writer(self._kube, self._store, self._epoch)
        secrets = self._routes.secrets(key.namespace)
        work = functools.partial(grant, self._kube, self._store, writer, key.namespace, secrets, self._gateway)
        outcome = await asyncio.to_thread(work, self._operators)
        if outcome is Outcome.GONE:
            self._operators.forget(key)
        return outcome
