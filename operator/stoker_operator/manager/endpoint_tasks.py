"""One task per endpoint or namespace, woken by changes and by the clock.

Waking is cheap and may happen at any rate: wake-ups during a reconcile are combined into one further run. A task
never runs two reconciles at a time, and a failing endpoint delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Set

from stoker_operator.cluster.kube import KubeError
from stoker_operator.objects.facts import Key
from stoker_operator.reconcile.apply import NotLeading
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import Settings

logger = logging.getLogger(__name__)


class EndpointTasks:
    """One task for each key: an endpoint or a namespace.

    Args:
        reconcile: reconciles the endpoint or namespace of a key.
        settings: the pauses after each outcome.
        jitter: returns a random number from 0 to 1, which spreads reconciles that would coincide.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[Outcome]],
        settings: Settings,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._reconcile = reconcile
        self._settings = settings
        self._jitter = jitter
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._woken: dict[Key, asyncio.Event] = {}

    def wake(self, key: Key) -> None:
        """Request a reconcile of the endpoint."""
        if key not in self._tasks:
            self._woken[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key, self._woken[key]), name=str(key))
        self._woken[key].set()

    async def stop(self) -> None:
        """End all tasks, but not the threads in which they reconcile. `wake` may be called afterwards."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._woken.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def keys(self) -> Set[Key]:
        """Return the keys that have a task."""
        return self._tasks.keys()

    def __len__(self) -> int:
        return len(self._tasks)

    async def _run(self, key: Key, woken: asyncio.Event) -> None:
        failures = quiet = 0
        while True:
            woken.clear()
            outcome, retry_after = await self._attempt(key)
            if outcome is Outcome.GONE and not woken.is_set():
                # Nothing has been awaited since the check above, so no wake-up is lost.
                del self._tasks[key], self._woken[key]
                return
            if outcome is Outcome.CHANGED:
                woken.set()
            failures = failures + 1 if outcome in (None, Outcome.REFUSED) else 0
            # Respect the API server's Retry-After, also if the endpoint is woken meanwhile.
            await asyncio.sleep(min(retry_after, self._settings.resync_seconds))
            try:
                async with asyncio.timeout(self._pause(outcome, failures, quiet)):
                    await woken.wait()
                quiet = 0
            except TimeoutError:
                quiet += 1

    async def _attempt(self, key: Key) -> tuple[Outcome | None, float]:
        """Return the outcome, or None after an exception, and the API server's Retry-After in seconds (0: none)."""
        try:
            return await self._reconcile(key), 0
        except KubeError as error:
            logger.warning("%s", error, extra=key.reference)
            return None, error.retry_after
        except NotLeading:
            logger.info("reconcile stopped: this replica does not lead", extra=key.reference)
        except Exception:
            logger.exception("reconcile failed; this is a bug in the operator", extra=key.reference)
        return None, 0

    def _pause(self, outcome: Outcome | None, failures: int, quiet: int) -> float:
        """Return the seconds until the endpoint is reconciled without being woken.

        Args:
            outcome: outcome of the last reconcile, or None after an exception.
            failures: number of consecutive exceptions and refusals.
            quiet: number of consecutive pauses without a wake-up.
        """
        settings = self._settings
        if failures:
            pause = settings.backoff_seconds * 2.0 ** min(failures - 1, 30)
        elif outcome is Outcome.HELD:
            pause = settings.recheck_seconds / 2
        elif outcome is Outcome.MOVING:
            pause = settings.recheck_seconds * 2.0 ** min(quiet, 4)
        else:
            pause = settings.resync_seconds
        return min(pause, settings.resync_seconds) * (0.8 + 0.4 * self._jitter())
