"""Lists all watched objects periodically, and watches optional kinds that the cluster gains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from typing import Final

from stoker_operator.admission.review import Object
from stoker_operator.cluster.informer import Informer, Watched
from stoker_operator.cluster.kube import KubeError
from stoker_operator.objects.facts import Key
from stoker_operator.settings import Settings

#: Processes an event of a watch: the kind, the type of change, the object.
OnEvent = Callable[[str, str | None, Object], None]
#: Watches kinds: calls the second argument with each event, and the third when the watch ends, in any thread.
Watch = Callable[[tuple[Watched, ...], OnEvent, Callable[[], None]], None]
#: Minimum pause before a list of `Relisting.run`, in seconds.
_LISTS_APART_SECONDS: Final = 30

logger = logging.getLogger(__name__)


class Relisting:
    """Lists all watched objects periodically, and on request.

    Args:
        settings: the operator's settings.
        informer: lists into the store.
        on_news: called after each list, also a failed one, with the endpoints for which it found changes.
        on_listed: called after each complete list.
        wake: requests a reconcile of an endpoint.
        working: returns the endpoints that have a task.
    """

    def __init__(
        self,
        settings: Settings,
        informer: Informer,
        on_news: Callable[[Set[Key]], None],
        on_listed: Callable[[], None],
        wake: Callable[[Key], None],
        working: Callable[[], Set[Key]],
    ) -> None:
        self._settings = settings
        self._informer = informer
        self._on_news = on_news
        self._on_listed = on_listed
        self._wake = wake
        self._working = working
        self._listing = asyncio.Lock()
        self._needed = asyncio.Event()
        # List again soon, because no watch reports deletions between the first list and the start of the watches.
        self._needed.set()

    def request(self) -> None:
        """Request a list before the interval is over."""
        self._needed.set()

    async def run(self) -> None:
        """List periodically. Wake endpoints without a task, or all if the kind PodMonitor was added or removed."""
        acted_on = self._informer.pod_monitors
        while True:
            await self._wait()
            if not await self.list():
                continue
            known = set(self._informer.endpoints())
            for key in known if acted_on != self._informer.pod_monitors else known - self._working():
                self._wake(key)
            # Remembered only after a complete list: a list that has found the change may still fail. A new leader wakes
            # all endpoints anyway.
            acted_on = self._informer.pod_monitors

    async def list(self) -> bool:
        """List all watched objects and report changes. Return whether all lists succeeded."""
        async with self._listing:
            try:
                await asyncio.to_thread(self._informer.relist)
            except KubeError as error:
                logger.warning("could not list the cluster: %s", error)
                return False
            finally:
                # Report also after a failure: what this list stored is not new any more when the watch reports it.
                self._on_news(self._informer.news())
        self._on_listed()
        return True

    async def _wait(self) -> None:
        """Wait until the interval is over or a list is requested, but at least for the minimum pause."""
        resync = self._settings.resync_seconds
        soonest = min(resync, _LISTS_APART_SECONDS)
        await asyncio.sleep(soonest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(resync - soonest):
                await self._needed.wait()
        self._needed.clear()


class WatchedKinds:
    """The watched kinds: those that every cluster has, and optional ones once the cluster has them.

    Args:
        informer: provides the kinds to watch.
        watch: watches optional kinds, or None if they are not watched.
        on_event: called with an event, in any thread.
        in_loop: calls a function in the event loop. Thread-safe.
    """

    def __init__(
        self,
        informer: Informer,
        watch: Watch | None,
        on_event: OnEvent,
        in_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._informer = informer
        self._watch = watch
        self._on_event = on_event
        self._in_loop = in_loop
        self._watched: set[Watched] = set()

    def everywhere(self) -> tuple[Watched, ...]:
        """Return the kinds that every cluster has, and record them as watched."""
        watched = tuple(each for each in self._informer.watched() if not each.optional)
        self._watched = set(watched)
        return watched

    def watch_optional(self) -> None:
        """Start to watch the unwatched optional kinds that the cluster has now."""
        new = tuple(each for each in self._informer.watched() if each not in self._watched)
        if not new or self._watch is None:
            return
        self._watched |= set(new)
        self._watch(new, self._on_event, lambda: self._in_loop(lambda: self._watched.difference_update(new)))
