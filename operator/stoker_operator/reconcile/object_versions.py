"""Caches the times at which the data of Secrets and ConfigMaps last changed, which are read from their metadata."""

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

#: Lifetime of an entry, as a fraction of the resync interval, which varies by a fifth: each resync must read again.
_REMEMBERED: Final = 0.75

logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    kind: str
    namespace: str
    name: str


class ObjectVersions:
    """Versions of objects that endpoints name. May be used by several threads.

    Args:
        kube: the API server's client.
        resync_seconds: interval of an endpoint's resync, in seconds. After a read, an object is not read again for
            three quarters of this interval, no matter how many endpoints name it and how often they are reconciled.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, kube: Kube, resync_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._seconds = resync_seconds * _REMEMBERED
        self._clock = clock
        self._known: dict[_Key, tuple[float, Future[Version | None]]] = {}
        self._lock = threading.Lock()

    def get(self, namespace: str, reference: Reference) -> Version | None:
        """Return an object's version, or None if the object does not exist or could never be read.

        A failed read is logged, and the last known version is returned.
        """
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
            return reading.result()  # another thread may still be reading; its request has a timeout
        try:
            pending.set_result(self._read(key))
        except (KubeError, KeyError, TypeError, ValueError) as error:
            # Keep the last known version, so that the status does not change with each failed request.
            pending.set_result(reading.result() if reading else None)
            logger.warning(
                "could not read %s %s of namespace %s, so it is unknown whether pods run with an earlier version: %s",
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
