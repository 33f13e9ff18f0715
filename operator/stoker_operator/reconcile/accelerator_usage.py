"""The pods that occupy the nodes' accelerators, in the whole cluster.

A cluster has many more pods than endpoints, so foreign pods are not watched. Pods are listed when a status must explain
why no node has room, which is rare. The result is cached for some seconds, so that a hundred unschedulable endpoints
cost one list. Pods are not listed if the operator may not read nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.objects.facts import Object
from stoker_operator.objects.owner import INSTANCE, MANAGED_BY
from stoker_operator.plan.capacity import Holder
from stoker_operator.plan.pod_requests import pod_requests

#: Field selector of pods that have a node and have not ended.
_RUNNING: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_FRESH_SECONDS: Final = 15.0

logger = logging.getLogger(__name__)


class AcceleratorUsage:
    """The pods that occupy accelerators, at most some seconds old.

    Args:
        kube: the API server's client.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._lock = threading.Lock()
        self._found: tuple[Holder, ...] = ()
        self._until: float | None = None

    def now(self) -> tuple[Holder, ...]:
        """Return the pods, or none if they could not be listed. Blocks."""
        with self._lock:
            if self._until is None or self._clock() >= self._until:
                self._found = self._list()
                self._until = self._clock() + _FRESH_SECONDS
            return self._found

    def _list(self) -> tuple[Holder, ...]:
        try:
            pages = self._kube.pages("Pod", fields=_RUNNING)
            return tuple(found for page in pages for live in page.items if (found := holder(live)))
        except KubeError as error:
            logger.warning("could not list the pods that occupy accelerators: %s", error)
            return ()


def holder(live: Object) -> Holder | None:
    """Return the devices that a pod occupies; None if it has no node, has ended, or occupies none.

    Pods of an endpoint are reported under the endpoint's name.
    """
    metadata, spec = live["metadata"], live["spec"]
    if not spec.get("nodeName") or (live.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    held = pod_requests(spec)
    if not held:
        return None
    labels = metadata.get("labels") or {}
    is_managed = MANAGED_BY.items() <= labels.items()
    name = labels.get(INSTANCE, metadata["name"]) if is_managed else metadata["name"]
    return Holder(f"{metadata['namespace']}/{name}", spec["nodeName"], held)
