"""List and watch of objects of one kind.

A watch runs in a thread, so that parsing a long list does not block the event loop that routes requests. The
synchronous Kubernetes client handles the cluster's configuration and the renewal of tokens.

After a failed or very short watch the objects are listed again, because a watch from the last version may fail too.
They are also listed periodically, because versions may go back when etcd is restored. The known objects stay in use
until the next list is complete.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from stoker_gateway.kubernetes.api import Api, ApiError, Object

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
#: Namespace and name.
Name = tuple[str, str]

#: Maximum number of objects in a page of a list.
_PAGE: Final = 500
#: Range of a watch's duration in seconds. A watch fails if no data arrives for its duration plus `_SILENT_S`.
_WATCH_S: Final = (60, 120)
_SILENT_S: Final = 15
#: Mean age of a list, in seconds, from which the end of a watch leads to a new list.
_RELIST_S: Final = 600
#: Backoff in seconds: base, maximum, and maximum wait for a Retry-After.
_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 5.0
_LONGEST_OBEYED_S: Final = 30.0
#: Minimum duration in seconds: of a watch, so that the next watch needs no list before it; and of a list with its
#: watches, so that the backoff is reset.
_LASTED_S: Final = 5.0


@dataclass(frozen=True)
class Kind:
    """Kind of the watched objects.

    Attributes:
        plural: plural of the kind, for log lines.
        path: API path.
        labels: label selector; an empty one selects all objects.
        remedy: advice for the log line if the API server does not have the kind.
    """

    plural: str
    path: str
    labels: str = ""
    remedy: str = ""


class Watch(Generic[Item]):
    """Mirrors the objects of a kind. `run` is the main function of a thread; the other methods are thread-safe.

    Args:
        read: returns the extract to store of an object; None means that the object is ignored.
        changed: called in the thread when extracts may have changed.
        clock: monotonic clock, in seconds.
        draw: returns a random number from 0 to 1, which spreads the requests of replicas.
    """

    def __init__(
        self,
        api: Api,
        kind: Kind,
        read: Callable[[Object], Item | None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._kind = kind
        self._read = read
        self._changed = changed
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._items: dict[Name, Item] = {}
        self._current_until: float | None = clock()
        self._logged_error = ""
        self.listed = False

    def items(self) -> dict[Name, Item]:
        """Return the extracts of the known objects."""
        with self._lock:
            return dict(self._items)

    def age_s(self) -> float:
        """Return the seconds for which changes may have been missed; 0 while the kind is watched."""
        until = self._current_until
        return 0.0 if until is None else self._clock() - until

    def run(self, stop: threading.Event) -> None:
        """List and watch until `stop` is set, which is checked between requests and after each event."""
        failures = 0
        while not stop.is_set():
            began = self._clock()
            wait_s = 0.0
            try:
                version = self._list()
                self._watch_on(version, began + _RELIST_S * (0.8 + 0.4 * self._draw()), stop)
            except ApiError as error:
                if error.status != 410:  # 410: the version has expired, which is normal
                    self._log_error(error)
                wait_s = min(_LONGEST_OBEYED_S, error.retry_after_s)
            if self._current_until is None:
                self._current_until = self._clock()
            failures = 0 if self._clock() - began >= _LASTED_S else failures + 1
            if failures:
                backoff_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(failures, 10))
                wait_s = max(wait_s, backoff_s * (0.5 + 0.5 * self._draw()))
            if wait_s:
                stop.wait(wait_s)

    def _list(self) -> str:
        """Replace the known objects by a new list, and return its version."""
        query = {"limit": str(_PAGE)} | ({"labelSelector": self._kind.labels} if self._kind.labels else {})
        found: dict[Name, Item] = {}
        while True:
            page = self._api.get(self._kind.path, query)
            for each in page.get("items") or ():
                if (item := self._read(each)) is not None:
                    found[_name(each)] = item
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        with self._lock:
            is_changed = not self.listed or self._items != found
            self._items, self.listed = found, True
        if is_changed:
            self._changed()
        return str(metadata.get("resourceVersion", ""))

    def _watch_on(self, version: str, until: float, stop: threading.Event) -> None:
        """Watch changes after a version, one watch after another, until `stop` is set or a new list is needed."""
        while not stop.is_set() and (began := self._clock()) < until:
            seconds = int(_WATCH_S[0] + (_WATCH_S[1] - _WATCH_S[0]) * self._draw())
            query = {
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(seconds),
            } | ({"labelSelector": self._kind.labels} if self._kind.labels else {})
            with self._api.lines(self._kind.path, query, seconds + _SILENT_S) as events:
                self._current_until = None
                if self._logged_error:
                    logger.info("%s can be watched again", self._kind.plural)
                    self._logged_error = ""
                for event in events:
                    version = self._take(event) or version
                    if stop.is_set():
                        return
            if self._clock() - began < _LASTED_S:
                return

    def _take(self, event: Object) -> str | None:
        """Process an event, and return its version, if it has one."""
        kind, manifest = event.get("type"), event["object"]
        if kind == "ERROR":
            code = manifest.get("code")
            raise ApiError(code if isinstance(code, int) else 0, str(manifest.get("message") or "the watch was ended"))
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            name = _name(manifest)
            item = None if kind == "DELETED" else self._read(manifest)
            with self._lock:
                before = self._items.pop(name, None)
                if item is not None:
                    self._items[name] = item
            if item != before:
                self._changed()
        version = (manifest.get("metadata") or {}).get("resourceVersion")
        return version if isinstance(version, str) else None

    def _log_error(self, error: ApiError) -> None:
        """Log an error unless it repeats."""
        remedy = ""
        if error.status == 404:
            remedy = self._kind.remedy
        elif error.status in (401, 403):
            remedy = "; allow the gateway's service account to list and watch them"
        message = f"{error}{remedy}"
        if message != self._logged_error:
            self._logged_error = message
            known = "the gateway keeps the known ones" if self.listed else "the gateway is not ready until they can be"
            logger.warning("%s cannot be watched: %s; %s", self._kind.plural, message, known)


def _name(manifest: Any) -> Name:
    metadata = manifest.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))
