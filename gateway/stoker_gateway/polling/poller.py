"""Polls the servers' readiness, load and models in a thread that limits its own CPU time.

A poll requests ``/ready``, or ``/health`` if the former returns 404. If the status is less than 500, it also requests
``/v1/models``, at longer intervals, and the load from ``/metrics`` (with vLLM's names). Regular polls are spread evenly
over a period that grows with their cost, so that they take at most about a tenth of a core. Polls of servers that
requests wait for take at most as much again. Polling has its own thread, whose CPU time is the cost.

A server is *lost* after several consecutive polls without an answer, or some seconds after the first of them began, for
example if its process is frozen. A lost server counts as not ready until it answers.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

import aiohttp

from stoker_gateway.errors import GatewayError
from stoker_gateway.scheduling.load import ServerLoad

#: Fraction of a core that regular polls may take, and that polls of servers that requests wait for may take in
#: addition; processing their results in the main event loop takes some more.
CORE_SHARE: Final = 0.08

#: Minimum interval of regular polls of a server, in seconds.
SHORTEST_PERIOD_S: Final = 1.0

#: Minimum interval of polls of servers that requests wait for, in seconds, and the maximum number of servers that are
#: polled at this interval.
AWAITED_PERIOD_S: Final = 0.2
MAX_AWAITED: Final = 32

#: Assumed CPU seconds of a poll until the cost is measured.
FIRST_COST_S: Final = 0.001

#: Timeout of a poll, in seconds.
TIMEOUT_S: Final = 3.0

#: Number of consecutive polls without an answer after which a server is lost.
LOST_AFTER: Final = 3

#: A server is also lost if its first unanswered poll began this many seconds ago; checked once in a period.
SILENT_S: Final = 3.5

#: Normal interval of requests for a server's models, and timeout of all these requests in a poll, in seconds.
MODELS_S: Final = 30.0
MODELS_TIMEOUT_S: Final = 1.0
#: Shorter interval, for example while these requests time out, or the server accepts only an earlier key.
SOON_S: Final = 3.0

#: Maximum size of a response's body in bytes; a larger one counts as empty.
MAX_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class PollResult:
    """Result of a poll.

    Attributes:
        server: address of the server.
        load: the server's report; not ready if the server is lost; None if the server did not answer but is not lost
            yet.
        sent_at: start of the poll, or of the first unanswered poll if this result reports `SILENT_S` of silence, in
            seconds of `time.monotonic`.
        answered: whether the server answered, even with an error.
    """

    server: str
    load: ServerLoad | None
    sent_at: float
    answered: bool = True


class Poller:
    """Polls servers regularly, and those that requests wait for more often.

    Args:
        poll: polls one server; raises `OSError`, `TimeoutError` or `aiohttp.ClientError` if it does not answer.
        on_result: called with each result.
        cpu_s: returns the CPU seconds that polling has used so far.
    """

    def __init__(
        self,
        poll: Callable[[str], Awaitable[ServerLoad]],
        on_result: Callable[[PollResult], None],
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._poll = poll
        self._on_result = on_result
        self._cpu_s = cpu_s
        self._servers: tuple[str, ...] = ()
        self._awaited: tuple[str, ...] = ()
        self._num_polls = 0
        self._in_flight: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: dict[str, int] = {}
        self._silent_since: dict[str, float] = {}
        self._cost_s = FIRST_COST_S

    @property
    def period_s(self) -> float:
        """Interval of regular polls of a server, in seconds."""
        return max(SHORTEST_PERIOD_S, len(self._servers) * self._cost_s / CORE_SHARE)

    def set_servers(self, servers: Iterable[str]) -> None:
        """Set the servers to poll; regular polls use them from the next period on. Thread-safe."""
        self._servers = tuple(dict.fromkeys(servers))

    def set_awaited(self, servers: Iterable[str]) -> None:
        """Set the servers that requests wait for; the first `MAX_AWAITED` are polled more often. Thread-safe."""
        self._awaited = tuple(dict.fromkeys(servers))[:MAX_AWAITED]

    async def run(self) -> None:
        """Poll until cancelled."""
        awaited = asyncio.get_running_loop().create_task(self._poll_awaited())
        try:
            await self._poll_all()
        finally:
            awaited.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(awaited, *self._tasks, return_exceptions=True)

    async def _poll_awaited(self) -> None:
        while True:
            servers = set(self._awaited).intersection(self._servers)
            for server in servers:
                self._start_poll(server)
            await asyncio.sleep(max(AWAITED_PERIOD_S, len(servers) * self._cost_s / CORE_SHARE))

    async def _poll_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            servers, period, began, cpu = self._servers, self.period_s, loop.time(), self._cpu_s()
            self._num_polls = 0
            known = set(servers)
            for memory in (self._unanswered, self._silent_since):
                for departed in memory.keys() - known:
                    memory.pop(departed)
            for number, server in enumerate(servers):
                await asyncio.sleep(began + period * number / len(servers) - loop.time())
                if loop.time() - (since := self._silent_since.get(server, math.inf)) >= SILENT_S:
                    # The result has the time of the first unanswered poll, so that a late answer still counts. This
                    # check does not repeat it until the server answers.
                    self._silent_since[server] = math.inf
                    self._on_result(PollResult(server, ServerLoad(ready=False, counted=False), since, answered=False))
                self._start_poll(server)
            await asyncio.sleep(began + period - loop.time())
            if servers:
                self._cost_s = (self._cpu_s() - cpu) / max(1, self._num_polls)

    def _start_poll(self, server: str) -> None:
        if server in self._in_flight:
            return
        self._in_flight.add(server)
        self._num_polls += 1
        task = asyncio.get_running_loop().create_task(self._poll_one(server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poll_one(self, server: str) -> None:
        sent_at = asyncio.get_running_loop().time()
        self._silent_since.setdefault(server, sent_at)  # infinite if the server is already lost for silence
        load: ServerLoad | None
        answered = False
        try:
            load = await self._poll(server)
        except (OSError, TimeoutError, aiohttp.ClientError):
            self._unanswered[server] = num_unanswered = self._unanswered.get(server, 0) + 1
            is_lost = num_unanswered >= LOST_AFTER or self._silent_since[server] == math.inf
            load = ServerLoad(ready=False, counted=False) if is_lost else None
        else:
            answered = True
            self._unanswered.pop(server, None)
            self._silent_since.pop(server, None)
        finally:
            self._in_flight.discard(server)
        self._on_result(PollResult(server, load, sent_at, answered))


#: Called with a server's address, the body of its response to ``GET /v1/models``, and the ``Authorization`` that it
#: accepted (empty if there was none).
OnModels = Callable[[str, bytes, str], None]


class HttpProbe:
    """Polls servers over HTTP, on persistent connections. An async context manager, used in one event loop.

    Args:
        on_models: called periodically with the models of ready servers; see `OnModels`.
    """

    def __init__(self, on_models: OnModels | None = None) -> None:
        self._on_models = on_models
        #: Server → time of the next request for its models, and the ``Authorization`` candidates at the last request.
        self._models_at: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._without_ready: set[str] = set()
        #: Server → index of the ``Authorization`` candidate to try first, if the last requests for its models timed
        #: out.
        self._first: dict[str, int] = {}
        self._authorizations: Mapping[str, tuple[str, ...]] = {}

    def set_authorizations(self, authorizations: Mapping[str, tuple[str, ...]]) -> None:
        """Set each server's ``Authorization`` candidates for ``GET /v1/models``, the current key first. A server that
        is new, or whose candidates change, gets this request in its next successful poll. Thread-safe."""
        self._authorizations = dict(authorizations)
        for server in set(self._models_at) - authorizations.keys():
            self._models_at.pop(server, None)

    async def __aenter__(self) -> HttpProbe:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=120),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept": "text/plain"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def __call__(self, server: str) -> ServerLoad:
        """Poll a server; see `Poller`."""
        async with asyncio.timeout(TIMEOUT_S):
            status = 404
            if server not in self._without_ready:
                status, _ = await self._get(server, "/ready")
            if status == 404:
                self._without_ready.add(server)
                status, _ = await self._get(server, "/health")
            if status != 200:
                self._without_ready.discard(server)  # the next process at this address may have ``/ready``
                self._models_at.pop(server, None)
            if status >= 500:
                return ServerLoad(ready=False, counted=False)
            await self._poll_models(server)
            status, body = await self._get(server, "/metrics")
            return read_metrics(body) if status == 200 else ServerLoad(counted=False)

    async def _poll_models(self, server: str) -> None:
        now = asyncio.get_running_loop().time()
        due, last_authorizations = self._models_at.get(server, (-math.inf, ()))
        authorizations = self._authorizations.get(server, ("",))
        if self._on_models is None or (now < due and last_authorizations == authorizations):
            return
        self._models_at[server] = now + SOON_S, authorizations
        first = number = self._first.pop(server, 0) % len(authorizations)
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                for number in (*range(first, len(authorizations)), *range(first)):
                    authorization = authorizations[number]
                    headers = {"authorization": authorization} if authorization else {}
                    status, body = await self._get(server, "/v1/models", {"accept": "application/json"} | headers)
                    if status == 200:
                        self._on_models(server, body, authorization)
                    if status not in (401, 403):
                        break
                if (number == 0 and status not in (401, 403)) or len(authorizations) == 1:
                    self._models_at[server] = now + MODELS_S, authorizations
        except TimeoutError:  # the poll continues without the models
            self._first[server] = number + (number == first)

    async def _get(self, server: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Return the status and the body of a response; the body is empty if it is too large."""
        async with self._session.get(f"http://{server}{path}", headers=headers, allow_redirects=False) as response:
            parts, size = list[bytes](), 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > MAX_BYTES:
                    response.close()
                    return response.status, b""
                parts.append(part)
            return response.status, b"".join(parts)


def read_metrics(text: bytes) -> ServerLoad:
    """Return a server's load from its metrics; not `counted` if a number of requests is absent, or any value invalid.

    If a metric has several series, for example one for each engine, requests are summed and KV cache usage is averaged.
    """
    text = b"\n" + text
    running, waiting = _values(text, b"vllm:num_requests_running"), _values(text, b"vllm:num_requests_waiting")
    used = _values(text, b"vllm:kv_cache_usage_perc")
    if not running or not waiting or not all(0 <= each < math.inf for each in running + waiting + used):
        return ServerLoad(counted=False)
    return ServerLoad(sum(running), sum(waiting), min(1.0, sum(used) / len(used)) if used else 0.0)


def _values(text: bytes, name: bytes) -> list[float]:
    """Return the values of all series of a metric, NaN for a value that is not a number. It searches for the name
    instead of parsing all lines, because most belong to other metrics."""
    values = list[float]()
    at = text.find(b"\n" + name)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        series = text[at + 1 + len(name) : end if end >= 0 else len(text)]
        if series[:1] == b"{":
            series = series[series.rfind(b"}") + 1 :]
        if series[:1] in (b" ", b"\t"):  # not a metric whose name only has this prefix
            try:
                values.append(float(series.split()[0]))
            except (ValueError, IndexError):
                values.append(math.nan)
        at = text.find(b"\n" + name, at + 1)
    return values


class PollerThread:
    """A poller in its own thread, which reports its results in the event loop of its creator.

    Args:
        on_result: called in that loop with each result.
        on_models: called in that loop; see `HttpProbe`.
    """

    def __init__(self, on_result: Callable[[PollResult], None], on_models: OnModels | None = None) -> None:
        self._owner = asyncio.get_running_loop()
        self._on_result = on_result
        self._on_models = on_models
        self._probe = HttpProbe(None if on_models is None else self._report_models)
        self.poller = Poller(self._probe, self._report)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[NoReturn] = self._owner.create_future()
        self._thread = threading.Thread(target=self._main, name="polling", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    async def watch(self) -> NoReturn:
        """Wait until the thread fails.

        Raises:
            GatewayError: the thread has ended with an unexpected error.
        """
        await asyncio.shield(self._failure)
        raise AssertionError("the future has only an exception")

    async def stop(self) -> None:
        """Stop polling, and return when the thread has ended."""
        with suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())
        await asyncio.to_thread(self._thread.join)

    def set_authorizations(self, authorizations: Mapping[str, tuple[str, ...]]) -> None:
        """Set the ``Authorization`` candidates of each server; see `HttpProbe`."""
        self._probe.set_authorizations(authorizations)

    def _report_models(self, server: str, answer: bytes, authorization: str) -> None:
        assert self._on_models is not None
        self._owner.call_soon_threadsafe(self._on_models, server, answer, authorization)

    def _report(self, result: PollResult) -> None:
        self._owner.call_soon_threadsafe(self._on_result, result)

    def _main(self) -> None:
        async def run() -> None:
            async with self._probe:
                await self.poller.run()

        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            failure = GatewayError(f"polling the servers failed: {error!r}")
            failure.__cause__ = error
            self._owner.call_soon_threadsafe(self._failure.set_exception, failure)
        finally:
            self._loop.close()
