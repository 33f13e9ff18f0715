"""Requests that wait until one of an endpoint's servers has room.

A new request queues behind those that wait, by the queue's rules (`scheduling/fair_queue.py`), but not behind requests
that wait for servers of their own: what only some servers may serve delays no other request. A poll may find room,
hence `wake` after each; and requests time out, hence a timer while any waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from stoker_common.errors import RequestError
from stoker_gateway.scheduling.fair_queue import FairQueue
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: Seconds between looks for who has waited too long.
_TICK_S: Final = 0.1
#: Retry-After, in seconds, for requests that were not let in.
RETRY_AFTER_S: Final = 1.0
#: What a request wants that any server may get: no subset, no holder.
_ANY: Final = (None, None)


class RequestQueue:
    """The requests that wait for one endpoint. Used from one event loop.

    Args:
        picker: of its servers.
        max_waiting: how many may wait.
        hold_s: for how many seconds each may.
        clock: seconds.
    """

    def __init__(self, picker: EndpointPicker, max_waiting: int, hold_s: float, clock: Callable[[], float]) -> None:
        self._picker = picker
        self._clock = clock
        self._queue: FairQueue[_Waiting] = FairQueue(max_waiting, hold_s)
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def at_once(self, ask: RoutingRequest) -> Pick | Refusal | None:
        """The choice, where nobody has to wait for it; None if this request has to."""
        if self:
            return None
        choice = self._picker.pick(ask, self._clock())
        return None if isinstance(choice, Refusal) and choice.kind == "saturated" else choice

    async def wait(
        self, ask: RoutingRequest, key: str, priority: int = 0, check: Callable[[], object] = lambda: None
    ) -> Pick | Refusal:
        """Waits for the choice.

        Args:
            key: whose request it is.
            check: called when its turn comes, before anything is chosen; what it raises is raised here.

        Returns:
            a refusal, if nothing may take it, too many wait, or it has waited for too long.
        """
        waiting = _Waiting(ask, check)
        if (displaced := self._queue.push(key, priority, waiting, self._clock())) is not None:
            displaced.end(displaced.refusal)
        self.wake()
        try:
            return await waiting.choice
        finally:
            self._queue.remove(waiting)

    def wake(self) -> None:
        """Lets those go whose turn it is, as there may be room now."""
        now = self._clock()
        for expired in self._queue.expire(now):
            expired.end(expired.refusal)
        full = set[tuple[frozenset[str] | None, str | None]]()

        def may_go(waiting: _Waiting) -> bool:
            if waiting.choice.done():
                return True  # its client has gone
            requirement = waiting.ask.subset, waiting.ask.held_by
            if requirement in full or _ANY in full:
                return False
            try:
                waiting.check()
            except RequestError as error:
                waiting.choice.set_exception(error)
                return True
            choice = self._picker.pick(waiting.ask, now)
            if isinstance(choice, Refusal) and choice.kind == "saturated":
                waiting.refusal = choice
                full.add(requirement)
                return False
            waiting.end(choice)
            return True

        while self._queue.pop(now, may_go) is not None:
            pass
        if self and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def close(self) -> None:
        """Refuses all who wait: the endpoint is gone."""
        for each in self._queue.expire(math.inf):
            each.end(Refusal("none", RETRY_AFTER_S))

    def _tick(self) -> None:
        self._timer = None
        if self:
            self.wake()


class _Waiting:
    """A request that waits.

    Args:
        ask: for what.
        check: whether it may go on; see `RequestQueue.wait`.
    """

    def __init__(self, ask: RoutingRequest, check: Callable[[], object]) -> None:
        self.ask = ask
        self.check = check
        self.choice: asyncio.Future[Pick | Refusal] = asyncio.get_running_loop().create_future()
        self.refusal = Refusal("saturated", RETRY_AFTER_S)

    def end(self, choice: Pick | Refusal) -> None:
        """Says what became of it, unless nobody waits any more."""
        if not self.choice.done():
            self.choice.set_result(choice)
