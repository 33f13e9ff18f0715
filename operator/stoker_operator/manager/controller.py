"""The whole operator: changes wake the endpoints' tasks, which reconcile if this replica leads.

    kopf's watches ─► on_event() ─► store ─► wake the endpoint's task ─► reconcile, in a thread ─► the cluster
    lists ──────────────────────────┘               ▲
    clock, arrival of a model's config.json ────────┘

Every replica watches everything, so that its webhook can answer from memory and it can take over quickly. Only the
leader has tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_operator.admission.review import Object
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.hub_configs import HubConfigs, Model
from stoker_operator.cluster.informer import Informer, Watched
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.manager.endpoint_tasks import EndpointTasks
from stoker_operator.manager.gateway_routes import GatewayRoutes
from stoker_operator.manager.process import Process
from stoker_operator.manager.reconciler import Reconciler, lead_writer
from stoker_operator.manager.relisting import Relisting, Watch, WatchedKinds
from stoker_operator.manager.reviews import Reviews
from stoker_operator.manager.scaling import ScalingLoop
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import INSTANCE
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.process.background_loop import OwnThread
from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.apply import MANAGER, WritesInFlight
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.gateway_rbac import KINDS as GRANTS
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import Settings
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition

#: Maximum time for which `Controller.stop` waits for the answers to writes, in seconds.
_LAST_WRITES_SECONDS: Final = 10.0


class Controller:
    """The whole operator, from `start` to `stop`, except the watches, which call `on_event`.

    Args:
        settings: the operator's settings.
        kube: the API server's client.
        catalogue: accelerators and images.
        policy: the administrator's permissions, and additions to endpoints' objects.
        watch: watches the kinds that a cluster may gain and lose.
        composition: the workloads of an endpoint.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        catalogue: Catalogue,
        policy: Policy = PERMISSIVE,
        watch: Watch | None = None,
        composition: Composition = ONE_DEPLOYMENT,
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._policy = policy
        self._composition = composition
        self._store = Store(MANAGER, INSTANCE)
        self._informer = Informer(
            kube, self._store, settings.namespaces, gateway=settings.gateway is not None, kinds=composition.kinds
        )
        self._metrics = Metrics()
        self._metrics.ask_endpoints(self._conditions)
        self._configs = HubConfigs(self._on_hub_attempt)
        self._reviews = Reviews(self._store, self._configs, self._context)
        self._process = Process(
            settings,
            kube,
            self._metrics,
            self._reviews.check,
            {"the cluster has been listed": lambda: self._informer.filled},
            on_gain=self._start_leading,
            on_loss=self._stop_working,
            learn=self._reviews.await_config,
        )
        self._in_flight = WritesInFlight()
        writer = functools.partial(
            lead_writer, kube, self._store, lambda: self._process.epoch(), in_flight=self._in_flight
        )
        lease = settings.lease
        operators = OtherOperators(kube, f"{lease.namespace}/{lease.name}" if lease else "")
        self._tasks = EndpointTasks(self._reconcile, settings)
        self._reconciler = Reconciler(
            settings, kube, self._store, self._metrics, writer, self._context, operators, self._wake_from_any_thread
        )
        self._routes = GatewayRoutes(settings, kube, self._store, writer, self._is_working, operators)
        signals = settings.gateway.signals if settings.gateway else ""
        self._scaling = ScalingLoop(
            GatewaySignals(signals) if signals else None,
            self._store,
            composition,
            self._routes.of,
            self._is_working,
            self._wake,
            self._metrics,
        )
        self._scaling_task: asyncio.Task[None] | None = None
        self._kinds = WatchedKinds(
            self._informer,
            watch,
            lambda kind, change, seen: self._call_in_loop(self.on_event, kind, change, seen),
            self._call_in_loop,
        )
        self._relisting = Relisting(
            settings,
            self._informer,
            self._on_news,
            self._kinds.watch_optional,
            self._wake,
            lambda: self._tasks.keys(),
        )
        self._working_epoch: int | None = None  # the term in which tasks are woken, after everything has been listed
        self._taking_over: asyncio.Task[None] | None = None
        self._resync: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def watched(self) -> tuple[Watched, ...]:
        """Return the watched kinds that every cluster has; optional kinds have separate watches."""
        return self._kinds.everywhere()

    async def start(self) -> None:
        """List the cluster, and start the servers and the election.

        Raises:
            KubeError: the cluster could not be listed.
            OSError: listening on an address failed.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._informer.relist)
        self._routes.update(self._informer.news())  # no task is woken: a new leader wakes all endpoints
        await self._process.start()
        self._kinds.watch_optional()
        self._resync = asyncio.create_task(self._relisting.run(), name="resync")
        self._scaling_task = asyncio.create_task(self._scaling.run(), name="scaling")

    async def stop(self) -> None:
        """End the tasks, release the Lease, and stop the servers.

        If writes take too long, the Lease is not released, and the next leader waits until it expires.
        """
        self._process.leave()
        ending = [task for task in (self._resync, self._scaling_task, self._taking_over) if task]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._end_tasks()
        # Threads whose tasks have ended may still wait for the answer to a write.
        thread = OwnThread("last writes")
        have_ended = await thread.call(lambda: self._in_flight.wait(_LAST_WRITES_SECONDS))
        thread.close()
        await self._process.stop(release=have_ended)

    def on_event(self, kind: str, change: str | None, seen: Object) -> None:
        """Process an event of a watch."""
        for key in self._routes.update(self._informer.on_event(kind, change, seen)):
            self._wake(key)
        if kind in GRANTS:
            self._routes.wake(seen["metadata"]["namespace"])
        if self._informer.needs_relist:
            self._relisting.request()

    async def _reconcile(self, key: Key) -> Outcome:
        outcome = await self._reconciler.reconcile(key)
        if outcome is Outcome.GONE:
            self._configs.forget(key)
        return outcome

    def _on_news(self, keys: Set[Key]) -> None:
        """Wake the endpoints for which a list found changes, all others whose route may have changed, and each
        namespace's task for the gateway's access to API keys."""
        for key in self._routes.update(keys):
            self._wake(key)
        self._routes.wake_all(self._informer.endpoints())

    def _start_leading(self) -> None:
        """Take over as the leader."""
        epoch = self._process.epoch()
        if self._settings.lease:
            self._taking_over = asyncio.create_task(self._take_over(epoch), name="take over")
        else:  # without election, no other replica has written since `start` listed the cluster
            self._start_working(epoch)

    async def _take_over(self, epoch: int | None) -> None:
        """List the cluster before working: the watches may lag behind the previous leader's writes."""
        pause = self._settings.backoff_seconds
        while self._process.epoch() == epoch and not await self._relisting.list():
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.resync_seconds)
        if self._process.epoch() == epoch:
            self._start_working(epoch)

    def _start_working(self, epoch: int | None) -> None:
        self._working_epoch = epoch
        endpoints = self._informer.endpoints()
        for key in endpoints:
            self._wake(key)
        self._routes.wake_all(endpoints)

    def _is_working(self) -> bool:
        return self._working_epoch is not None and self._working_epoch == self._process.epoch()

    def _wake(self, key: Key) -> None:
        if self._is_working():
            self._tasks.wake(key)

    def _wake_from_any_thread(self, key: Key) -> None:
        self._call_in_loop(self._wake, key)

    async def _end_tasks(self) -> None:
        await asyncio.gather(self._tasks.stop(), self._routes.stop())

    def _stop_working(self) -> None:
        """End the tasks. Threads that still run start no more writes."""
        self._working_epoch = None
        if self._taking_over:
            self._taking_over.cancel()
        self._configs.forget_all()
        self._reconciler.stop()
        # Keep a reference: the event loop does not keep a task alive.
        self._stopping = asyncio.create_task(self._end_tasks(), name="stop")

    def _on_hub_attempt(self, _model: Model, users: Set[Key]) -> None:
        """Wake admission reviews and endpoints after an attempt to fetch a model's config.json. Thread-safe."""
        self._call_in_loop(self._reviews.on_hub_attempt)
        for key in users:
            self._wake_from_any_thread(key)

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop, if the loop exists and is not closed. Thread-safe."""
        if self._loop:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *arguments)

    def _context(self, user: Key | None = None) -> PlanningContext:
        return PlanningContext(
            self._catalogue,
            functools.partial(self._configs.get, user=user),
            self._informer.pod_monitors,
            self._policy,
            pending=self._configs.pending,
            route=self._routes.of(user) if user else None,
            composition=self._composition,
            scaling=self._scaling.recommendation(user) if user else None,
        )

    def _conditions(self) -> Mapping[tuple[str, str], int]:
        """Return the number of endpoints by condition and status."""
        documents: list[Any] = list(self._store.all(KIND))
        return Counter(
            (condition["type"], condition["status"])
            for document in documents
            for condition in document.get("status", {}).get("conditions", ())
        )
