"""Lists everything now and then, and begins to watch kinds that the cluster got meanwhile."""

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

#: Takes in an event of a watch: the kind, what happened, the object.
OnEvent = Callable[[str, str | None, Object], None]
#: Watches these kinds; calls the second with each event, and the third when the watch ends; from any thread.
Watch = Callable[[tuple[Watched, ...], OnEvent, Callable[[], None]], None]
#: Between two lists, whatever happens.
_LISTS_APART_SECONDS: Final = 30

logger = logging.getLogger(__name__)


class Relisting:
    """The lists.

    Args:
        settings: how the operator runs.
        informer: what is listed.
        on_news: called with the endpoints for which a list found something new, also one that failed further on.
        on_listed: called once everything has been listed.
        wake: called with an endpoint to look at, whether there is something new or not.
        working: the endpoints that have a task.
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
        self._needed.set()  # what is deleted after the first list and before the watches begin, no watch reports

    def request(self) -> None:
        """A watch has made a list necessary."""
        self._needed.set()

    async def run(self) -> None:
        """Lists everything now and then, and looks at every endpoint for which that found something new."""
        acted_on = self._informer.pod_monitors
        while True:
            await self._wait()
            if not await self.list():
                continue
            known = set(self._informer.endpoints())
            for key in known if acted_on != self._informer.pod_monitors else known - self._working():
                self._wake(key)
            # Only now: a round that found it may have failed later. A replica that begins to lead looks at all anyway.
            acted_on = self._informer.pod_monitors

    async def list(self) -> bool:
        """Lists everything, and reports what is new; whether it could be listed."""
        async with self._listing:
            try:
                await asyncio.to_thread(self._informer.relist)
            except KubeError as error:
                logger.warning("the cluster could not be listed: %s", error)
                return False
            finally:
                # What a list reports first is not new any more when the watch reports it.
                self._on_news(self._informer.news())
        self._on_listed()
        return True

    async def _wait(self) -> None:
        """Until the interval is over, or a watch makes a list necessary; but never too soon after the last one."""
        resync = self._settings.resync_seconds
        soonest = min(resync, _LISTS_APART_SECONDS)
        await asyncio.sleep(soonest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(resync - soonest):
                await self._needed.wait()
        self._needed.clear()


class WatchedKinds:
    """The kinds that are watched: those that every cluster has, and optional ones as the cluster gets them.

    Args:
        informer: what there is to watch.
        watch: watches optional kinds; None: they are not watched.
        on_event: called, in any thread, with an event.
        in_loop: has the event loop call a function; may be called from any thread.
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
        """Those that every cluster has, which are watched from now on."""
        watched = tuple(each for each in self._informer.watched() if not each.optional)
        self._watched = set(watched)
        return watched

    def watch_optional(self) -> None:
        """Begins to watch those optional kinds that the cluster has now."""
        new = tuple(each for each in self._informer.watched() if each not in self._watched)
        if not new or self._watch is None:
            return
        self._watched |= set(new)
        self._watch(new, self._on_event, lambda: self._in_loop(lambda: self._watched.difference_update(new)))
