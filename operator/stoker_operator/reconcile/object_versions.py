"""When Secrets and ConfigMaps got their data: read from the API server as metadata, and remembered for a while."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.reconcile.referenced_objects import Reference, Version

#: Of the time between two looks at an endpoint, which varies by a fifth: each look reads again.
_REMEMBERED: Final = 0.75

logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    kind: str
    namespace: str
    name: str


class ObjectVersions:
    """Versions of objects that endpoints name. May be used by several threads.

    Args:
        kube: the cluster.
        resync_seconds: how often an endpoint is looked at. Within most of that, an object is read once, however many
            endpoints name it and however often they are reconciled.
        clock: monotonic seconds.
    """

    def __init__(self, kube: Kube, resync_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._seconds = resync_seconds * _REMEMBERED
        self._clock = clock
        self._known: dict[_Key, tuple[float, Future[Version | None]]] = {}
        self._lock = threading.Lock()

    def get(self, namespace: str, reference: Reference) -> Version | None:
        """When an object got its data; None where there is no such object, or it could not be read, which the log
        says."""
        key, now = _Key(reference.kind, namespace, reference.name), self._clock()
        with self._lock:
            at, reading = self._known.get(key, (-math.inf, None))
            if reading and now - at < self._seconds:
                pending = None
            else:
                pending = Future[Version | None]()
                self._known = {each: known for each, known in self._known.items() if now - known[0] < 4 * self._seconds}
                self._known[key] = (now, pending)
        if pending is None:
            assert reading
            return reading.result()  # which another thread may be at; a request has a timeout
        try:
            pending.set_result(self._read(key))
        except (KubeError, KeyError, TypeError, ValueError) as error:
            # What was known last may well hold: status does not change each time a request fails.
            pending.set_result(reading.result() if reading else None)
            logger.warning(
                "%s %s of namespace %s could not be read, so whether pods run with an earlier one is not known: %s",
                key.kind,
                key.name,
                key.namespace,
                error,
            )
        except BaseException:
            pending.set_result(None)
            raise
        return pending.result()

    def _read(self, key: _Key) -> Version | None:
        metadata = self._kube.metadata(*key)
        return Version.of(metadata) if metadata else None
