"""Queue of requests that wait until one of an endpoint's servers has room, or is ready.

A new request queues behind waiting ones by the rules of `scheduling/fair_queue.py`. A request that only some servers
may get does not block others. The queue is checked after each poll, which may find room, and by a timer, for timeouts.

An endpoint with scaling *holds* its requests while none of its servers is ready, or while the operator forbids sending
requests (`hold.py`). Held requests wait in the same queue by the same rules, but for a longer maximum time, and the
total size of their bodies is limited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.hold import EndpointHold
from stoker_gateway.scheduling.fair_queue import FairQueue
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: Interval of checks for timed-out requests, in seconds: normally, and while requests are held.
_TICK_S: Final = 0.1
_HELD_TICK_S: Final = 1.0
#: Retry-After in seconds, for requests that waited for room.
RETRY_AFTER_S: Final = 1.0
#: Retry-After in seconds, for requests that were held, or exceeded the limits of held requests.
HELD_RETRY_AFTER_S: Final = 5.0
#: Outcome of a held request. `start_failed` and `no_room` also apply to requests that were rejected without a hold.
HeldOutcome = Literal["routed", "timed_out", "start_failed", "no_room", "cancelled", "refused"]
_REFUSED: Final[dict[str, HeldOutcome]] = {"held": "timed_out", "not started": "start_failed", "not held": "no_room"}
#: Requirement of a request that any server may get: no subset, no holder.
_ANY: Final = (None, None)


async def not_extended(_: float) -> None:
    """Do nothing: the proxy's timeout needs no extension."""


@dataclass(frozen=True, slots=True)
class WaitTerms:
    """Conditions under which a request waits.

    Attributes:
        key: owner of the request. Owners take turns.
        priority: requests with a higher priority leave the queue first.
        num_bytes: size of the request's body, which stays in memory while it waits.
        waited_s: seconds that the request has waited before, while its body was read.
        check: called when the request's turn comes, before a server is chosen; an exception ends the wait.
        extend: awaited once if the request is held, with the remaining seconds of the hold.
        ended: called with the outcome and the waiting time in seconds when the request stops waiting, if it was held or
            was rejected instead of being held.
    """

    key: str
    priority: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0
    check: Callable[[], object] = lambda: None
    extend: Callable[[float], Awaitable[None]] = not_extended
    ended: Callable[[HeldOutcome, float], object] = lambda _outcome, _seconds: None


class RequestQueue:
    """Requests that wait for one endpoint. Used from one event loop.

    Args:
        picker: picker of the endpoint's servers.
        max_waiting: maximum number of requests that wait for room.
        max_wait_s: maximum time that a request waits for room, in seconds.
        clock: monotonic clock, in seconds.

    Attributes:
        hold: the endpoint's hold; None means that requests are rejected while none of its servers is ready.
    """

    def __init__(self, picker: EndpointPicker, max_waiting: int, max_wait_s: float, clock: Callable[[], float]) -> None:
        self._picker = picker
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._queue: FairQueue[_Waiting] = FairQueue(max_waiting, max_wait_s)
        self._timer: asyncio.TimerHandle | None = None
        self._holds = False  # whether requests were held at the last check
        self.hold: EndpointHold | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def num_held(self) -> int:
        """Return the number of waiting requests if requests are held, else 0. Thread-safe."""
        return len(self) if self._holds else 0

    def num_queued(self) -> int:
        """Return the number of waiting requests if they wait for a server with room, else 0. Thread-safe."""
        return 0 if self._holds else len(self)

    def is_holding(self, now: float) -> bool:
        """Whether the endpoint holds its requests at this time."""
        return self.hold is not None and (self.hold.stops(now) or not self._picker.has_server(now))

    def at_once(self, request: RoutingRequest) -> Pick | Refusal | None:
        """Return the choice for a request that does not have to wait, else None."""
        if self or self.is_holding(self._clock()):
            return None
        choice = self._picker.pick(request, self._clock())
        return None if isinstance(choice, Refusal) and choice.kind == "saturated" else choice

    async def wait(self, request: RoutingRequest, terms: WaitTerms) -> Pick | Refusal:
        """Queue a request and wait for the choice.

        Returns:
            the pick; or a refusal if no server may get the request, the queue is full, or the wait has timed out.
        """
        now = self._clock()
        waiting = _Waiting(request, terms, now)
        hold = self.hold
        self._holds = self.is_holding(now)
        if hold is not None and self._holds:
            if hold.start_failed(now):
                terms.ended("start_failed", 0.0)
                return Refusal("not started", HELD_RETRY_AFTER_S)
            self._push_held(waiting, hold, now)
        else:
            wait_s = max(0.0, self._max_wait_s - terms.waited_s)
            # The queue may also contain requests that were held before.
            max_items = self._max_waiting if hold is None else max(self._max_waiting, hold.max_held)
            displaced = self._queue.push(terms.key, terms.priority, waiting, now, wait_s, max_items)
            if displaced is not None:
                self._refuse_room(displaced)
        self.wake()
        try:
            news: tuple[asyncio.Future[Any], ...] = waiting.choice, waiting.held
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.choice.done():
                await terms.extend(waiting.held.result())
            choice = await waiting.choice
            if not waiting.was_held:
                return choice
            return replace(choice, held_s=self._clock() - waiting.since)
        finally:
            self._queue.remove(waiting)
            waiting.release()
            if (outcome := waiting.held_outcome) is not None:
                terms.ended(outcome, self._clock() - waiting.since)

    def wake(self) -> None:
        """Reject requests that timed out; then hold the others, or route them while servers have room."""
        now = self._clock()
        for expired in self._queue.expire(now):
            expired.end(expired.refusal)
        self._holds = self.is_holding(now)
        if self.hold is not None and self._holds:
            self._hold_all(self.hold, now)
        else:
            self._release(now)
        self._picker.backlog = bool(self)
        if not self:
            return
        tick_s = _TICK_S if not self._holds else max(_TICK_S, min(_HELD_TICK_S, self._queue.next_expiry - now))
        if self._timer is not None and self._timer.when() > asyncio.get_running_loop().time() + tick_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(tick_s, self._tick)

    def close(self) -> None:
        """Reject all waiting requests, because the endpoint was removed."""
        for each in self._queue.expire(math.inf):
            each.end(Refusal("none", RETRY_AFTER_S))

    def _release(self, now: float) -> None:
        full = set[tuple[frozenset[str] | None, str | None]]()

        def may_go(waiting: _Waiting) -> bool:
            if waiting.choice.done():
                return True  # the client has disconnected
            requirement = waiting.request.subset, waiting.request.held_by
            if requirement in full or _ANY in full:
                return False
            try:
                waiting.terms.check()
            except RequestError as error:
                waiting.choice.set_exception(error)
                return True
            choice = self._picker.pick(waiting.request, now)
            if isinstance(choice, Refusal) and choice.kind == "saturated":
                if not waiting.was_held:
                    waiting.refusal = choice
                full.add(requirement)
                return False
            waiting.end(choice)
            return True

        while self._queue.pop(now, may_go) is not None:
            pass

    def _push_held(self, waiting: _Waiting, hold: EndpointHold, now: float) -> None:
        """Hold a new request if the limits allow it, and reject the requests that it displaces."""
        terms, queue = waiting.terms, self._queue
        if terms.num_bytes > hold.max_bytes:
            self._refuse_room(waiting)
            return
        max_items = len(queue) + hold.max_held - hold.num_held
        displaced = queue.push(terms.key, terms.priority, waiting, now, hold.scaling.hold_s, max_items)
        if displaced is not None:
            self._refuse_room(displaced)
        if displaced is waiting:
            return
        waiting.become_held(hold, now)
        while hold.held_bytes > hold.max_bytes:
            queue.remove(waiting)
            displaced = queue.displaced_by(
                terms.key, terms.priority, terms.num_bytes, lambda each: each.terms.num_bytes
            )
            if displaced is None:
                self._refuse_room(waiting)
                return
            queue.remove(displaced)
            self._refuse_room(displaced)
            queue.push(terms.key, terms.priority, waiting, now, hold.scaling.hold_s, len(queue) + 1)

    def _hold_all(self, hold: EndpointHold, now: float) -> None:
        """Hold all waiting requests, because no server of the endpoint may get requests."""
        for waiting in list(self._queue):
            if hold.start_failed(waiting.since):
                self._queue.remove(waiting)
                waiting.end(Refusal("not started", HELD_RETRY_AFTER_S))
            elif not waiting.was_held:
                if hold.num_held >= hold.max_held or hold.held_bytes + waiting.terms.num_bytes > hold.max_bytes:
                    self._queue.remove(waiting)
                    self._refuse_room(waiting)
                    continue
                waiting.become_held(hold, now)
                self._queue.extend(waiting, waiting.since + hold.scaling.hold_s)

    def _refuse_room(self, waiting: _Waiting) -> None:
        """Reject a request because there is no room for it in the queue."""
        waiting.end(Refusal("not held", HELD_RETRY_AFTER_S) if self._holds or waiting.was_held else waiting.refusal)
        waiting.release()

    def _tick(self) -> None:
        self._timer = None
        if self:
            self.wake()


class _Waiting:
    """A waiting request.

    Args:
        request: routing request.
        terms: conditions of the wait.
        since: time at which the wait began, in seconds.
    """

    def __init__(self, request: RoutingRequest, terms: WaitTerms, since: float) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.terms = terms
        self.since = since
        self.choice: asyncio.Future[Pick | Refusal] = loop.create_future()
        self.refusal = Refusal("saturated", RETRY_AFTER_S)
        #: Done when the request is held; the result is the remaining seconds of the hold.
        self.held: asyncio.Future[float] = loop.create_future()
        self._hold: EndpointHold | None = None

    @property
    def was_held(self) -> bool:
        """Whether the request was held at any time."""
        return self.held.done()

    @property
    def held_outcome(self) -> HeldOutcome | None:
        """Outcome of the request; None if it was neither held nor rejected instead of being held."""
        if not self.choice.done() or self.choice.cancelled():
            outcome: HeldOutcome = "cancelled"
        elif self.choice.exception() is not None:
            outcome = "refused"
        else:
            choice = self.choice.result()
            outcome = _REFUSED.get(choice.kind, "refused") if isinstance(choice, Refusal) else "routed"
        return outcome if self.was_held or outcome in ("no_room", "start_failed") else None

    def become_held(self, hold: EndpointHold, now: float) -> None:
        """Count the request as held."""
        self._hold = hold
        hold.num_held += 1
        hold.held_bytes += self.terms.num_bytes
        self.refusal = Refusal("held", HELD_RETRY_AFTER_S)
        self.held.set_result(max(0.0, self.since + hold.scaling.hold_s - now))

    def release(self) -> None:
        """Stop counting the request as held."""
        if self._hold is not None:
            self._hold.num_held -= 1
            self._hold.held_bytes -= self.terms.num_bytes
            self._hold = None

    def end(self, choice: Pick | Refusal) -> None:
        """Set the result of the wait, unless the client has disconnected."""
        if not self.choice.done():
            self.choice.set_result(choice)
