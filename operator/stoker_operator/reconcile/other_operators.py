"""Which operator serves an endpoint where several look after its namespace: one does, and the others stand back.

An operator is named by its Lease, which all its replicas share. The one that serves an endpoint has its name in an
annotation of what runs the endpoint's pods. Another operator that finds this name leaves the endpoint alone as long as
the named one is there: the Deployment of an operator has the name of its Lease. Where that cannot be seen, as in a
namespace that is not ours to read, writes tell: a name that replaces ours is that of an operator that works. So after
one write of each the writing ends, whatever the operators see of each other.

An endpoint that is refused has no such object. Its status is left as another writer has it, for a while, where that has
replaced the same one of ours several times.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.objects.facts import Key, Object
from stoker_operator.objects.owner import OPERATOR, operator_of

#: The label of the chart's Deployment of the operator.
_LABEL: Final = ("app.kubernetes.io/name", "stoker-operator")
#: An operator's Deployment is not looked at again sooner, in seconds.
_APART: Final = 5.0
#: The same status is written so many times in so many seconds, whoever replaces it.
_STATUS_WRITES: Final = 3
_STATUS_SECONDS: Final = 600.0

logger = logging.getLogger(__name__)


class OtherOperators:
    """What this operator knows of others. May be used by several threads.

    Args:
        kube: the cluster.
        own_name: this operator's name, as NAMESPACE/NAME of its Lease; empty where it has none.
        clock: monotonic seconds.
    """

    def __init__(self, kube: Kube, own_name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.own_name = own_name
        self._kube = kube
        self._clock = clock
        self._served: set[Key] = set()  # where our name was
        self._yielded: dict[Key, str] = {}  # to whom
        self._there: dict[str, tuple[float, bool]] = {}
        self._statuses: dict[Key, tuple[Any, int, float]] = {}  # what was written, how often, since when

    def serving(self, key: Key, live: Object | None) -> str:
        """The other operator that serves an endpoint; empty where this one does.

        Args:
            key: the endpoint, or what else has a name of an operator.
            live: the object with the name; None: there is none yet.

        Raises:
            KubeError: the API server could not be reached, or could not answer.
        """
        self.observe(key, live)
        named = operator_of(live) if live is not None else ""
        if live is None or named in ("", self.own_name) or not (self._is_there(named) or key in self._served):
            if self._yielded.pop(key, ""):
                logger.info("this operator serves it now", extra=key.reference)
            return ""
        if self._yielded.get(key) != named:
            self._yielded[key] = named
            logger.warning(
                "left to the operator %s, which looks after this namespace too; give each release namespaces of its "
                "own (watchNamespaces), or uninstall one. Where that one is gone, remove the annotation %s of %s %s",
                named,
                OPERATOR,
                live["kind"],
                live["metadata"]["name"],
                extra=key.reference,
            )
        return named

    def observe(self, key: Key, live: Object | None) -> None:
        """The object is so now, as this operator or another one has written it."""
        if live is not None and operator_of(live) == self.own_name:
            self._served.add(key)

    def replaces(self, key: Key, status: Mapping[str, Any]) -> bool:
        """Whether another writer has replaced the status that is about to be written, again and again."""
        last_status, times, since = self._statuses.get(key, (None, 0, 0.0))
        if last_status != _without_times(status) or times < _STATUS_WRITES or self._clock() - since > _STATUS_SECONDS:
            return False
        if times == _STATUS_WRITES:
            self._statuses[key] = (last_status, times + 1, since)
            logger.warning(
                "another writer replaces the status, perhaps an operator of another release that looks after this "
                "namespace too; it is left so for a while. Give each release namespaces of its own (watchNamespaces)",
                extra=key.reference,
            )
        return True

    def wrote_status(self, key: Key, status: Mapping[str, Any]) -> None:
        """The status has been written, since it was another one."""
        last_status, times, since = self._statuses.get(key, (None, 0, 0.0))
        now, same = self._clock(), _without_times(status)
        is_repeated = last_status == same and now - since <= _STATUS_SECONDS
        self._statuses[key] = (same, times + 1, since) if is_repeated else (same, 1, now)

    def forget(self, key: Key) -> None:
        """The endpoint is gone."""
        self._served.discard(key)
        self._yielded.pop(key, None)
        self._statuses.pop(key, None)

    def _is_there(self, operator: str) -> bool:
        """Whether the Deployment of an operator is seen that is to have pods."""
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
