"""Chooses one operator for an endpoint whose namespace several operators watch. The others yield.

An operator's name is the name of its Lease, which all its replicas share. The operator that serves an endpoint writes
its name into an annotation of the object that runs the endpoint's pods. Another operator that finds this name yields
while the Deployment with the Lease's name is installed. An operator whose own name was replaced yields until the
annotation is removed: the operator that replaced it is running, even if its Deployment cannot be read. So the operators
stop overwriting each other after one write each.

An endpoint whose spec was never valid has no such object. If another writer replaces the same status several times,
this operator therefore stops writing that status for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.objects.facts import Key, Object
from stoker_operator.objects.owner import OPERATOR, operator_of

#: Label of the operator's Deployment in the Helm chart.
_LABEL: Final = ("app.kubernetes.io/name", "stoker-operator")
#: Minimum interval between two reads of an operator's Deployment, in seconds.
_APART: Final = 5.0
#: Maximum number of writes of the same status within `_STATUS_SECONDS` seconds.
_STATUS_WRITES: Final = 3
_STATUS_SECONDS: Final = 600.0

logger = logging.getLogger(__name__)


class OtherOperators:
    """Finds out which endpoints other operators serve. May be used by several threads.

    Args:
        kube: the API server's client.
        own_name: NAMESPACE/NAME of this operator's Lease; empty without one.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, kube: Kube, own_name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.own_name = own_name
        self._kube = kube
        self._clock = clock
        self._served: set[Key] = set()  # endpoints that had this operator's name
        self._yielded: dict[Key, str] = {}  # endpoint → other operator that serves it
        self._there: dict[str, tuple[float, bool]] = {}  # operator → valid until, whether it is installed
        self._statuses: dict[Key, tuple[Any, int, float]] = {}  # status written, number of writes, time of the first

    def serving(self, key: Key, live: Object | None) -> str:
        """Return the name of the other operator that serves an endpoint; empty if this one may serve it.

        Args:
            key: the endpoint, or a namespace whose objects name an operator.
            live: the object whose annotation names an operator; None if it does not exist.

        Raises:
            KubeError: a request to the API server failed.
        """
        self.observe(key, live)
        named = operator_of(live) if live is not None else ""
        if live is None or named in ("", self.own_name) or not (self._is_there(named) or key in self._served):
            if self._yielded.pop(key, ""):
                logger.info("this operator now serves the endpoint", extra=key.reference)
            return ""
        if self._yielded.get(key) != named:
            self._yielded[key] = named
            logger.warning(
                "skipped: the operator %s also watches this namespace and serves the endpoint; give each release its "
                "own namespaces (watchNamespaces), or uninstall one. If that operator is gone, remove the annotation "
                "%s of %s %s",
                named,
                OPERATOR,
                live["kind"],
                live["metadata"]["name"],
                extra=key.reference,
            )
        return named

    def observe(self, key: Key, live: Object | None) -> None:
        """Record the endpoint if `live`, in its current state, has this operator's name."""
        if live is not None and operator_of(live) == self.own_name:
            self._served.add(key)

    def replaces(self, key: Key, status: Mapping[str, Any]) -> bool:
        """Return whether another writer repeatedly replaced the status that is about to be written. Log it once."""
        last_status, times, since = self._statuses.get(key, (None, 0, 0.0))
        if last_status != _without_times(status) or times < _STATUS_WRITES or self._clock() - since > _STATUS_SECONDS:
            return False
        if times == _STATUS_WRITES:
            self._statuses[key] = (last_status, times + 1, since)
            logger.warning(
                "another writer keeps replacing the status, perhaps the operator of another release that watches this "
                "namespace; this operator pauses writing it. Give each release its own namespaces (watchNamespaces)",
                extra=key.reference,
            )
        return True

    def wrote_status(self, key: Key, status: Mapping[str, Any]) -> None:
        """Record that `status` was written over a different status."""
        last_status, times, since = self._statuses.get(key, (None, 0, 0.0))
        now, same = self._clock(), _without_times(status)
        is_repeated = last_status == same and now - since <= _STATUS_SECONDS
        self._statuses[key] = (same, times + 1, since) if is_repeated else (same, 1, now)

    def forget(self, key: Key) -> None:
        """Remove a deleted endpoint."""
        self._served.discard(key)
        self._yielded.pop(key, None)
        self._statuses.pop(key, None)

    def _is_there(self, operator: str) -> bool:
        """Return whether an operator is installed: its Deployment can be read, has the chart's label, is not being
        deleted, and desires replicas."""
        until, is_installed = self._there.get(operator, (0.0, False))
        if self._clock() < until:
            return is_installed
        namespace, _, name = operator.partition("/")
        found = None
        if namespace and name:
            try:
                found = self._kube.get("Deployment", namespace, name)
            except KubeError as error:
                if error.status != 403:
                    raise
        is_installed = (
            found is not None
            and (found["metadata"].get("labels") or {}).get(_LABEL[0]) == _LABEL[1]
            and "deletionTimestamp" not in found["metadata"]
            and found["spec"].get("replicas", 1) > 0
        )
        self._there[operator] = (self._clock() + _APART, is_installed)
        return is_installed


def _without_times(status: Mapping[str, Any]) -> dict[str, Any]:
    conditions = ({**each, "lastTransitionTime": ""} for each in status.get("conditions") or ())
    return {**status, "conditions": list(conditions)}
