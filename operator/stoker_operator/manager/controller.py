"""The operator put together: what is seen wakes endpoints' tasks, and those reconcile, where this replica leads.

    kopf's watches ─► on_event() ─► store ─► wake the endpoint's task ─► reconcile, in a thread ─► the cluster
    lists ──────────────────────────┘               ▲
    clock, a model's description arriving ──────────┘

Every replica sees everything, so that its webhook can judge from memory and it can take over at once. Only the one that
leads has tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from datetime import UTC, datetime
from typing import Any, Final

from stoker_operator.admission.review import Object, ReviewVerdict
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster import observe
from stoker_operator.cluster.engine_facts import EngineFacts
from stoker_operator.cluster.engine_watch import EngineWatch
from stoker_operator.cluster.hub_configs import HubConfigs, Model
from stoker_operator.cluster.informer import Informer, Watched
from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.cluster.store import Store
from stoker_operator.manager.endpoint_tasks import EndpointTasks
from stoker_operator.manager.process import Process
from stoker_operator.manifests.storage import shrinking_problem
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import INSTANCE, Owner
from stoker_operator.plan.capacity import capacity
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.process.background_loop import WorkerThreads
from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.accelerator_usage import AcceleratorUsage
from stoker_operator.reconcile.apply import MANAGER, NotLeading, Writer
from stoker_operator.reconcile.decide import is_ours
from stoker_operator.reconcile.evaluate import Evaluation, PlanningContext, evaluate
from stoker_operator.reconcile.gateway_rbac import KINDS as GRANTS
from stoker_operator.reconcile.gateway_rbac import grant, namespaces
from stoker_operator.reconcile.object_versions import ObjectVersions
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Cluster, Outcome, reconcile, report_failure
from stoker_operator.reconcile.routing import Routes
from stoker_operator.settings import Settings
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition

#: Watches these kinds; calls the second with each event, and the third when the watch ends; from any thread.
Watch = Callable[[tuple[Watched, ...], Callable[[str, str | None, Object], None], Callable[[], None]], None]
#: Between two lists, whatever happens.
_LISTS_APART_SECONDS: Final = 30
#: A review is answered later by no more than this; the API server waits some seconds.
_REVIEW_WAITS_SECONDS: Final = 2
#: Reconciles that are made at a time; one that hangs does not count.
_RECONCILES: Final = 16
#: The most characters of an error that a condition repeats.
_ERROR: Final = 500
_BUG: Final = "this is a bug in the operator, whose log has more; a changed spec is tried at once"

logger = logging.getLogger(__name__)


class Controller:
    """The whole operator, from `start` to `stop`, but for the watches, which report what happens.

    Args:
        settings: how it runs.
        kube: the cluster.
        catalogue: accelerators and images.
        policy: what the administrator permits endpoints, and adds to their objects.
        watch: watches the kinds that may be added to the cluster, and go.
        composition: of which workloads endpoints consist.
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
        self._composition = composition
        self._catalogue = catalogue
        self._policy = policy
        self._store = Store(MANAGER, INSTANCE)
        self._informer = Informer(
            kube, self._store, settings.namespaces, gateway=settings.gateway is not None, kinds=composition.kinds
        )
        self._routes = Routes(settings.gateway)
        self._metrics = Metrics()
        self._metrics.ask_endpoints(self._conditions)
        self._workers = WorkerThreads("reconcile", _RECONCILES, settings.reconcile_seconds)
        self._tasks = EndpointTasks(self._reconcile, settings)
        self._grants = EndpointTasks(self._grant, settings)
        self._configs = HubConfigs(self._on_hub_attempt)
        self._hub_attempted = asyncio.Event()
        self._engines = EngineFacts(self._on_engine_report)
        self._engine_watch = EngineWatch(self._on_engine_report)
        self._process = Process(
            settings,
            kube,
            self._metrics,
            self._check,
            {"the cluster has been listed": lambda: self._informer.filled},
            on_gain=self._start_leading,
            on_loss=self._stop_working,
            learn=self._await_config,
        )
        self._watch = watch
        self._watched: set[Watched] = set()
        self._kube = kube
        self._accelerator_usage = AcceleratorUsage(kube)
        lease = settings.lease
        self._operators = OtherOperators(kube, f"{lease.namespace}/{lease.name}" if lease else "")
        self._versions = ObjectVersions(kube, settings.resync_seconds) if settings.check_referenced_objects else None
        self._listing = asyncio.Lock()
        self._needs_list = asyncio.Event()
        self._working_epoch: int | None = None  # the lead in which tasks are woken: all has been listed in it
        self._taking_over: asyncio.Task[None] | None = None
        self._resync: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def watched(self) -> tuple[Watched, ...]:
        """The kinds of object to watch that every cluster has. The others, which may also go, are watched apart."""
        watched = tuple(each for each in self._informer.watched() if not each.optional)
        self._watched = set(watched)
        return watched

    async def start(self) -> None:
        """Sees all there is, and begins to work.

        Raises:
            KubeError: the API server does not answer.
            OSError: an address cannot be listened on.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._informer.relist)
        self._update_routes(self._informer.news())  # a replica that begins to lead looks at all
        await self._process.start()
        self._watch_optional()
        self._resync = asyncio.create_task(self._relist(), name="resync")

    async def stop(self) -> None:
        """Ends; what is under way is finished, and nothing started."""
        self._process.leave()
        ending = [task for task in (self._resync, self._taking_over) if task]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._end_tasks()
        await self._process.stop()

    def on_event(self, kind: str, change: str | None, seen: Object) -> None:
        """Takes in an event of a watch."""
        for key in self._update_routes(self._informer.on_event(kind, change, seen)):
            self._wake(key)
        if kind in GRANTS:
            self._wake_grant(seen["metadata"]["namespace"])
        if self._informer.needs_relist:
            self._needs_list.set()

    async def _reconcile(self, key: Key) -> Outcome:
        began, epoch = time.monotonic(), self._process.epoch()
        writer = Writer(self._kube, self._store, lambda: epoch is not None and self._process.epoch() == epoch)
        facts = self._engines.reported, self._engine_watch.engine_states
        cluster = Cluster(self._kube, self._store, writer, self._accelerator_usage.now, *facts, self._operators)
        if self._versions:
            cluster = dataclasses.replace(cluster, version=self._versions.get)
        work = functools.partial(reconcile, cluster, self._context(key), key, datetime.now(UTC))
        try:
            outcome = await self._workers.call(work, lambda: self._report_late(cluster, key))
        except NotLeading:
            raise  # no failure
        except KubeError as error:
            self._metrics.failed(error.status, time.monotonic() - began)
            raise
        except Exception as error:
            self._metrics.failed("bug", time.monotonic() - began)
            error_text = f"{type(error).__name__}: {error}"[:_ERROR]
            problem = f"the operator fails to reconcile this endpoint: {error_text}; {_BUG}"
            await asyncio.to_thread(self._report, cluster, key, problem)
            raise
        self._metrics.reconciled(outcome.value, time.monotonic() - began)
        if outcome is Outcome.GONE:
            self._engines.forget(key)
            self._engine_watch.forget(key)
            self._configs.forget(key)
            self._operators.forget(key)
        return outcome

    def _report_late(self, cluster: Cluster, key: Key) -> None:
        seconds = self._settings.reconcile_seconds
        logger.warning("reconciling takes more than %g seconds", seconds, extra=key.reference)
        problem = f"the operator has been reconciling this endpoint for more than {seconds:g} seconds; {_BUG}"
        reporting = asyncio.get_running_loop().run_in_executor(None, self._report, cluster, key, problem)
        # The reconcile may have ended meanwhile, and its status been replaced by this one: the next one puts it right.
        reporting.add_done_callback(lambda _: self._wake(key))

    def _report(self, cluster: Cluster, key: Key, problem: str) -> None:
        """Has the endpoint's status say that the operator fails."""
        with contextlib.suppress(NotLeading):
            try:
                report_failure(cluster, key, problem, datetime.now(UTC))
            except KubeError as error:
                logger.warning("the status could not be written: %s", error, extra=key.reference)
            except Exception:
                logger.exception("this is a bug in the operator", extra=key.reference)

    async def _grant(self, key: Key) -> Outcome:
        """Lets the gateway read what it needs in a namespace, and no more."""
        gateway, epoch = self._settings.gateway, self._process.epoch()
        if gateway is None:
            return Outcome.GONE
        writer = Writer(self._kube, self._store, lambda: epoch is not None and self._process.epoch() == epoch)
        secrets = self._routes.secrets(key.namespace)
        work = functools.partial(grant, self._kube, self._store, writer, key.namespace, secrets, gateway)
        outcome = await asyncio.to_thread(work, self._operators)
        if outcome is Outcome.GONE:
            self._operators.forget(key)
        return outcome

    async def _relist(self) -> None:
        """Lists everything now and then, and looks at every endpoint for which that found something new."""
        acted_on = self._informer.pod_monitors
        while True:
            await self._wait_for_next_list()
            if not await self._list():
                continue
            known = set(self._informer.endpoints())
            for key in known if acted_on != self._informer.pod_monitors else known - self._tasks.keys():
                self._wake(key)
            # Only now: a round that found it may have failed later. A replica that begins to lead looks at all anyway.
            acted_on = self._informer.pod_monitors

    async def _wait_for_next_list(self) -> None:
        """Until the interval is over, or a watch makes a list necessary; but never too soon after the last one."""
        resync = self._settings.resync_seconds
        soonest = min(resync, _LISTS_APART_SECONDS)
        self._needs_list.clear()
        await asyncio.sleep(soonest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(resync - soonest):
                await self._needs_list.wait()

    async def _list(self) -> bool:
        """Lists everything, and wakes the tasks of what is new; whether it could be listed."""
        async with self._listing:
            try:
                await asyncio.to_thread(self._informer.relist)
            except KubeError as error:
                logger.warning("the cluster could not be listed: %s", error)
                return False
            finally:
                # What a list reports first is not new any more when the watch reports it.
                for key in self._update_routes(self._informer.news()):
                    self._wake(key)
                self._wake_grants()
        self._watch_optional()
        return True

    def _watch_optional(self) -> None:
        """Begins to watch those optional kinds that the cluster has now."""
        new = tuple(each for each in self._informer.watched() if each not in self._watched)
        if not new or self._watch is None:
            return
        self._watched |= set(new)
        self._watch(
            new,
            lambda kind, change, seen: self._call_in_loop(self.on_event, kind, change, seen),
            lambda: self._call_in_loop(self._watched.difference_update, new),
        )

    def _start_leading(self) -> None:
        """This replica begins to lead."""
        epoch = self._process.epoch()
        if self._settings.lease:
            self._taking_over = asyncio.create_task(self._take_over(epoch), name="take over")
        else:  # there is no other writer whose writes we might not have seen
            self._start_working(epoch)

    async def _take_over(self, epoch: int | None) -> None:
        """Sees what others have done before it continues with it: our watches may be behind."""
        pause = self._settings.backoff_seconds
        while self._process.epoch() == epoch and not await self._list():
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.resync_seconds)
        if self._process.epoch() == epoch:
            self._start_working(epoch)

    def _start_working(self, epoch: int | None) -> None:
        self._working_epoch = epoch
        self._wake_all()

    def _wake(self, key: Key) -> None:
        if self._working_epoch is not None and self._working_epoch == self._process.epoch():
            self._tasks.wake(key)

    def _wake_all(self) -> None:
        for key in self._informer.endpoints():
            self._wake(key)
        self._wake_grants()

    def _wake_grants(self) -> None:
        for namespace in {key.namespace for key in self._informer.endpoints()} | namespaces(self._store):
            self._wake_grant(namespace)

    def _wake_grant(self, namespace: str) -> None:
        if self._settings.gateway and self._working_epoch is not None and self._working_epoch == self._process.epoch():
            self._grants.wake(Key(namespace, ""))

    def _update_routes(self, keys: Set[Key]) -> set[Key]:
        """Looks again at who of these the gateway serves; returns them, with the others for which that changes
        something."""
        changed: set[Key] = set()
        for key in keys:
            document, namespace = self._store.get(KIND, *key), self._store.get("Namespace", "", key.namespace)
            changed |= self._routes.learn(key, document, namespace)
        for namespace_name in {key.namespace for key in changed}:
            self._wake_grant(namespace_name)
        return {*keys, *changed}

    async def _end_tasks(self) -> None:
        await asyncio.gather(self._tasks.stop(), self._grants.stop())

    def _stop_working(self) -> None:
        """The tasks end; what a thread is still at cannot write any more."""
        self._working_epoch = None
        if self._taking_over:
            self._taking_over.cancel()
        self._configs.forget_all()
        self._engine_watch.forget_all()
        # Kept, since the event loop itself does not keep a task alive.
        self._stopping = asyncio.create_task(self._end_tasks(), name="stop")

    def _on_hub_attempt(self, _model: Model, users: Set[Key]) -> None:
        """A description that endpoints wait for has come, or will not come soon; may be called from any thread."""
        self._call_in_loop(self._answer_reviews)
        for key in users:
            self._call_in_loop(self._wake, key)

    def _answer_reviews(self) -> None:
        """Those that wait for a description look again."""
        self._hub_attempted.set()
        self._hub_attempted = asyncio.Event()

    def _on_engine_report(self, key: Key) -> None:
        """An engine has reported what was not known of it; may be called from any thread."""
        self._call_in_loop(self._wake, key)

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the event loop call it; may be called from any thread, also when the loop has ended."""
        if self._loop:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(function, *arguments)

    def _context(self, user: Key | None = None) -> PlanningContext:
        configs = functools.partial(self._configs.get, user=user)
        return PlanningContext(
            self._catalogue,
            configs,
            self._informer.pod_monitors,
            self._policy,
            pending=self._configs.pending,
            route=self._routes.of(user) if user else None,
            composition=self._composition,
        )

    async def _await_config(self, document: Object) -> None:
        """Waits a little for what the webhook's verdict rests on, where it is on its way."""
        awaited = self._evaluate(document).awaited if _is_of_hub(document) else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REVIEW_WAITS_SECONDS):
                while awaited and self._configs.pending(*awaited):
                    await self._hub_attempted.wait()

    def _evaluate(self, document: Object, before: Object | None = None) -> Evaluation:
        metadata = document["metadata"]
        name = metadata.get("name") or metadata.get("generateName") or ""
        return evaluate(Owner(name, metadata.get("namespace")), document, self._context(), before)

    def _check(self, document: Object, before: Object | None) -> ReviewVerdict:
        """The webhook's judge."""
        evaluation = self._evaluate(document, before)
        if evaluation.plan is None or evaluation.parsed is None:
            return ReviewVerdict(evaluation.violations)
        violations, notices, nodes = list(evaluation.violations), [], observe.nodes(self._store)
        for workload in evaluation.workloads:
            if before and (problem := shrinking_problem(workload.spec, self._claim(document, workload.name))):
                violations.append(problem)
            if planned := evaluation.plans.get(workload.name):
                # What holds accelerators now may be gone tomorrow; what no node has, is not there tomorrow either.
                room = capacity(nodes, (), planned.placement.accelerator, planned.placement.count)
                notices += [*planned.warnings, *([room] if room else [])]
        return ReviewVerdict(tuple(violations), tuple(dict.fromkeys(notices)))

    def _claim(self, document: Object, workload: str) -> Object | None:
        """The claim that was made for an endpoint's workload."""
        metadata = document["metadata"]
        owner = Owner(metadata["name"], metadata.get("namespace"), metadata.get("uid"), workload)
        live = self._store.get("PersistentVolumeClaim", owner.namespace or "", owner.object_name)
        return live if live is not None and is_ours(owner, live) else None

    def _conditions(self) -> Mapping[tuple[str, str], int]:
        """How many endpoints have which condition."""
        documents: list[Any] = list(self._store.all(KIND))
        return Counter(
            (condition["type"], condition["status"])
            for document in documents
            for condition in document.get("status", {}).get("conditions", ())
        )


def _is_of_hub(document: Object) -> bool:
    """Whether a manifest, which may be anything, names a model of the hub."""
    spec = document.get("spec")
    model = spec.get("model") if isinstance(spec, Mapping) else None
    source = model.get("source") if isinstance(model, Mapping) else None
    return isinstance(source, str) and source.startswith("hf://")
