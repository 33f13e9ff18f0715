"""Reconciles single endpoints in threads, and reports those on which the operator itself fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from stoker_operator.cluster.engine_facts import EngineFacts
from stoker_operator.cluster.engine_watch import EngineWatch
from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import Key
from stoker_operator.process.background_loop import WorkerThreads
from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.accelerator_usage import AcceleratorUsage
from stoker_operator.reconcile.apply import NotLeading, Writer
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.object_versions import ObjectVersions
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome, reconcile, report_failure
from stoker_operator.settings import Settings

#: Reconciles that are made at a time; one that hangs does not count.
_RECONCILES: Final = 16
#: The most characters of an error that a condition repeats.
_ERROR: Final = 500
_BUG: Final = "this is a bug in the operator, whose log has more; a changed spec is tried at once"

logger = logging.getLogger(__name__)


class Reconciler:
    """Reconciles endpoints.

    Args:
        settings: how the operator runs.
        kube: the cluster.
        store: what has been seen of it.
        metrics: where outcomes are counted.
        epoch: the number of the lead in which this replica may write; None: it may not.
        context: what verdicts on an endpoint rest on.
        operators: what is known of other operators.
        wake: called, in any thread, with an endpoint for which there is something new.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        store: Store,
        metrics: Metrics,
        epoch: Callable[[], int | None],
        context: Callable[[Key], PlanningContext],
        operators: OtherOperators,
        wake: Callable[[Key], None],
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._epoch = epoch
        self._context = context
        self._operators = operators
        self._wake = wake
        self._workers = WorkerThreads("reconcile", _RECONCILES, settings.reconcile_seconds)
        self._engines = EngineFacts(wake)
        self._engine_watch = EngineWatch(wake)
        self._accelerator_usage = AcceleratorUsage(kube)
        self._versions = ObjectVersions(kube, settings.resync_seconds) if settings.check_referenced_objects else None

    async def reconcile(self, key: Key) -> Outcome:
        """Reconciles an endpoint once.

        Raises:
            KubeError: the API server could not be reached, or could not answer.
            NotLeading: another replica writes now.
            Exception: the operator fails on this endpoint, whose status reports it.
        """
        began, cluster = time.monotonic(), self._cluster()
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
            self._operators.forget(key)
        return outcome

    def stop(self) -> None:
        """Engines are no longer polled; the work goes to another replica."""
        self._engine_watch.forget_all()

    def _cluster(self) -> Cluster:
        writer = lead_writer(self._kube, self._store, self._epoch)
        facts = self._engines.reported, self._engine_watch.engine_states
        cluster = Cluster(self._kube, self._store, writer, self._accelerator_usage.now, *facts, self._operators)
        return dataclasses.replace(cluster, version=self._versions.get) if self._versions else cluster

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


def lead_writer(kube: Kube, store: Store, epoch: Callable[[], int | None]) -> Writer:
    """A writer that may write for as long as this replica has the lead that it has now."""
    began = epoch()
    return Writer(kube, store, lambda: began is not None and epoch() == began)
