"""Who holds the nodes' accelerators: all pods of the cluster, whosever they are.

They are listed when a status has to state why there is no room, which is seldom, and never watched: a cluster has
many more pods than endpoints. What was found serves for some seconds, so that a hundred endpoints that wait for room
cost one round of requests. Where nodes may not be seen, neither need pods be.
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

#: Pods that have a node and have not ended; the API server looks for them.
_RUNNING: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_FRESH_SECONDS: Final = 15.0

logger = logging.getLogger(__name__)


class AcceleratorUsage:
    """The pods that hold accelerators, as of some seconds ago.

    Args:
        kube: where they are.
        clock: seconds that never go back.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._lock = threading.Lock()
        self._found: tuple[Holder, ...] = ()
        self._until: float | None = None

    def now(self) -> tuple[Holder, ...]:
        """All of them; none where the API server does not say. Blocks."""
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
            logger.warning("who holds accelerators cannot be said: %s", error)
            return ()


def holder(live: Object) -> Holder | None:
    """The pod as a holder of accelerators; None where it has no node, has ended, or holds none. Pods of an endpoint are
    called by its name."""
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
