"""Reconciles single endpoints in threads, and reports endpoints on which the operator itself fails."""

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
from stoker_operator.reconcile.apply import NotLeading, Writer, WritesInFlight
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.object_versions import ObjectVersions
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome, reconcile, report_failure
from stoker_operator.settings import Settings

#: Maximum number of concurrent reconciles; late reconciles are not counted.
_RECONCILES: Final = 16
#: Maximum length of an error in a condition, in characters.
_ERROR: Final = 500
_BUG: Final = "this is a bug in the operator; see the operator's log"

logger = logging.getLogger(__name__)


class Reconciler:
    """Reconciles endpoints, a limited number at a time.

    Args:
        settings: the operator's settings.
        kube: the API server's client.
        store: the watched objects.
        metrics: the operator's metrics.
        writer: returns a writer for this replica's current term as the leader.
        context: returns the inputs of an endpoint's evaluation.
        operators: finds out which operator serves an endpoint.
        wake: requests a reconcile of an endpoint. Thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        store: Store,
        metrics: Metrics,
        writer: Callable[[], Writer],
        context: Callable[[Key], PlanningContext],
        operators: OtherOperators,
        wake: Callable[[Key], None],
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._writer = writer
        self._context = context
        self._operators = operators
        self._wake = wake
        self._workers = WorkerThreads("reconcile", _RECONCILES, settings.reconcile_seconds)
        self._engines = EngineFacts(wake)
        self._engine_watch = EngineWatch(wake)
        self._accelerator_usage = AcceleratorUsage(kube)
        self._versions = ObjectVersions(kube, settings.resync_seconds) if settings.check_referenced_objects else None

    async def reconcile(self, key: Key) -> Outcome:
        """Reconcile an endpoint once.

        Raises:
            KubeError: a request to the API server failed.
            NotLeading: this replica does not lead.
            Exception: a bug in the operator; the endpoint's status reports it if possible.
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
            problem = (
                f"the operator fails to reconcile this endpoint: {error_text}; {_BUG}. "
                "A change of the spec is reconciled at once"
            )
            await asyncio.to_thread(self._report, cluster, key, problem)
            raise
        self._metrics.reconciled(outcome.value, time.monotonic() - began)
        if outcome is Outcome.GONE:
            self._engines.forget(key)
            self._engine_watch.forget(key)
            self._operators.forget(key)
        return outcome

    def stop(self) -> None:
        """Stop polling engines, because this replica stops leading."""
        self._engine_watch.forget_all()

    def _cluster(self) -> Cluster:
        facts = self._engines.reported, self._engine_watch.engine_states
        cluster = Cluster(self._kube, self._store, self._writer(), self._accelerator_usage.now, *facts, self._operators)
        return dataclasses.replace(cluster, version=self._versions.get) if self._versions else cluster

    def _report_late(self, cluster: Cluster, key: Key) -> None:
        seconds = self._settings.reconcile_seconds
        logger.warning("reconciling takes more than %g seconds", seconds, extra=key.reference)
        problem = f"the operator has been reconciling this endpoint for more than {seconds:g} seconds; {_BUG}"
        reporting = asyncio.get_running_loop().run_in_executor(None, self._report, cluster, key, problem)
        # This report may replace the status of a reconcile that has ended meanwhile. The next reconcile corrects it.
        reporting.add_done_callback(lambda _: self._wake(key))

    def _report(self, cluster: Cluster, key: Key, problem: str) -> None:
        """Report a failed or late reconcile (`problem`) in the endpoint's status."""
        with contextlib.suppress(NotLeading):
            try:
                report_failure(cluster, key, problem, datetime.now(UTC))
            except KubeError as error:
                logger.warning("could not write the status: %s", error, extra=key.reference)
            except Exception:
                logger.exception("could not write the status; this is a bug in the operator", extra=key.reference)


def lead_writer(kube: Kube, store: Store, epoch: Callable[[], int | None], in_flight: WritesInFlight) -> Writer:
    """Return a writer that writes only during this replica's current term as the leader.

    Args:
        kube: the API server's client.
        store: the watched objects.
        epoch: returns the number of the current term, or None if this replica may not write.
        in_flight: counts the writes.
    """
    began = epoch()
    return Writer(kube, store, lambda: began is not None and epoch() == began, in_flight)
