"""How servers do: each is asked in turn, all the time, by one thread that knows what that costs.

A server is asked whether it wants requests (``/ready``, or ``/health`` where there is no such path) and, if so, what
it has to do (``/metrics``, by vLLM's names). Asking is spread evenly over a period, which stretches so that it takes at
most a tenth of a core, however many servers there are. The thread exists for that: its processor time is what asking
costs, and nothing else.

A server that does not answer is *lost* after some times in a row, or once it has been silent for some seconds, as one
that is frozen: it then counts as not ready, until it answers.
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

#: The part of a core that asking may take; passing on what was heard takes some more in the thread that hears it.
CORE_SHARE: Final = 0.08

#: Seconds between two times a server is asked, if there are few.
SHORTEST_PERIOD_S: Final = 1.0

#: The same, for servers that requests wait for; and how many of these are asked so often.
AWAITED_PERIOD_S: Final = 0.2
MAX_AWAITED: Final = 32

#: Processor seconds that asking a server is taken to cost until it is known.
FIRST_COST_S: Final = 0.001

#: Seconds a server has to answer.
TIMEOUT_S: Final = 3.0

#: After so many times without an answer a server is lost.
LOST_AFTER: Final = 3

#: A server that has been asked so many seconds ago, and has not answered since, is lost too. It is looked for once a
#: period, so a frozen one is lost some five seconds after its last answer.
SILENT_S: Final = 3.5

#: Seconds between two times a server is asked for its models, while it is ready.
MODELS_S: Final = 30.0
MODELS_TIMEOUT_S: Final = 1.0
#: The same, while it does not answer, or not to the key that servers are to want now.
SOON_S: Final = 3.0

#: Bytes of an answer beyond which nothing is read from it.
MAX_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class PollResult:
    """What came of asking a server.

    Attributes:
        server: its address.
        load: what it says; None if it did not answer.
        sent_at: when it was asked, by the event loop's clock (`time.monotonic`).
        answered: whether it answered at all.
    """

    server: str
    load: ServerLoad | None
    sent_at: float
    answered: bool = True


class Poller:
    """Asks servers how they do.

    Args:
        ask: asks one server; raises `OSError`, `TimeoutError` or `aiohttp.ClientError` if it does not answer.
        hear: told what came of it.
        cpu_s: the processor seconds spent so far on all this.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[ServerLoad]],
        hear: Callable[[PollResult], None],
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._ask = ask
        self._hear = hear
        self._cpu_s = cpu_s
        self._servers: tuple[str, ...] = ()
        self._awaited: tuple[str, ...] = ()
        self._num_asked = 0
        self._in_flight: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: dict[str, int] = {}
        self._silent_since: dict[str, float] = {}
        self._cost_s = FIRST_COST_S

    @property
    def period_s(self) -> float:
        """Seconds between two times a server is asked."""
        return max(SHORTEST_PERIOD_S, len(self._servers) * self._cost_s / CORE_SHARE)

    def set_servers(self, servers: Iterable[str]) -> None:
        """These are all there are, from the next period on. May be called by any thread."""
        self._servers = tuple(dict.fromkeys(servers))

    def set_awaited(self, servers: Iterable[str]) -> None:
        """Requests wait for these: they are asked more often, if they are few. May be called by any thread."""
        self._awaited = tuple(dict.fromkeys(servers))[:MAX_AWAITED]

    async def run(self) -> None:
        """Asks until it is cancelled."""
        awaited = asyncio.get_running_loop().create_task(self._ask_awaited())
        try:
            await self._ask_all()
        finally:
            awaited.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(awaited, *self._tasks, return_exceptions=True)

    async def _ask_awaited(self) -> None:
        while True:
            await asyncio.sleep(AWAITED_PERIOD_S)
            for server in set(self._awaited).intersection(self._servers):
                self._start_asking(server)

    async def _ask_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            servers, period, began, cpu = self._servers, self.period_s, loop.time(), self._cpu_s()
            self._num_asked = 0
            known = set(servers)
            for memory in (self._unanswered, self._silent_since):
                for departed in memory.keys() - known:
                    memory.pop(departed)
            for number, server in enumerate(servers):
                await asyncio.sleep(began + period * number / len(servers) - loop.time())
                if loop.time() - (since := self._silent_since.get(server, math.inf)) >= SILENT_S:
                    # As of then, so that a late answer still counts; and once, until it answers.
                    self._silent_since[server] = math.inf
                    self._hear(PollResult(server, ServerLoad(ready=False, counted=False), since, answered=False))
                self._start_asking(server)
            await asyncio.sleep(began + period - loop.time())
            if servers:
                self._cost_s = (self._cpu_s() - cpu) / max(1, self._num_asked)

    def _start_asking(self, server: str) -> None:
        if server in self._in_flight:
            return
        self._in_flight.add(server)
        self._num_asked += 1
        task = asyncio.get_running_loop().create_task(self._ask_one(server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_one(self, server: str) -> None:
        sent_at = asyncio.get_running_loop().time()
        self._silent_since.setdefault(server, sent_at)  # infinite: it is lost for that
        load: ServerLoad | None
        answered = False
        try:
            load = await self._ask(server)
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
        self._hear(PollResult(server, load, sent_at, answered))


#: Told a server's address, its answer to ``GET /v1/models``, and the ``Authorization`` that it answered to, if any.
HearModels = Callable[[str, bytes, str], None]


class HttpAsker:
    """Asks servers over HTTP, on connections that stay open. To be used inside one event loop, as a context.

    Args:
        hear_models: told now and then what a server that is ready says of its models; see `HearModels`.
    """

    def __init__(self, hear_models: HearModels | None = None) -> None:
        self._hear_models = hear_models
        #: By server, when it is next asked for its models, and what it was told in ``Authorization`` the last time.
        self._models_at: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._without_ready: set[str] = set()
        #: By server, the number of the ``Authorization`` to begin with, where there was no time for all of them.
        self._first: dict[str, int] = {}
        self._authorizations: Mapping[str, tuple[str, ...]] = {}

    def ask_as(self, authorizations: Mapping[str, tuple[str, ...]]) -> None:
        """This is what servers may want to be told in ``Authorization`` where they are asked for their models, the
        likeliest first. A server that was not among them is asked at once. May be called by any thread."""
        self._authorizations = dict(authorizations)
        for server in set(self._models_at) - authorizations.keys():
            self._models_at.pop(server, None)

    async def __aenter__(self) -> HttpAsker:
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
        """What a server says; see `Poller`."""
        async with asyncio.timeout(TIMEOUT_S):
            status = 404
            if server not in self._without_ready:
                status, _ = await self._get(server, "/ready")
            if status == 404:
                self._without_ready.add(server)
                status, _ = await self._get(server, "/health")
            if status != 200:
                self._without_ready.discard(server)  # whatever comes next by this address may have it
                self._models_at.pop(server, None)
            if status >= 500:
                return ServerLoad(ready=False, counted=False)
            await self._ask_models(server)
            status, body = await self._get(server, "/metrics")
            return read_metrics(body) if status == 200 else ServerLoad(counted=False)

    async def _ask_models(self, server: str) -> None:
        now = asyncio.get_running_loop().time()
        due, last_authorizations = self._models_at.get(server, (-math.inf, ()))
        authorizations = self._authorizations.get(server, ("",))
        if self._hear_models is None or (now < due and last_authorizations == authorizations):
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
                        self._hear_models(server, body, authorization)
                    if status not in (401, 403):
                        break
                if number == 0 or len(authorizations) == 1:
                    self._models_at[server] = now + MODELS_S, authorizations
        except TimeoutError:  # how it does is known without
            self._first[server] = number + (number == first)

    async def _get(self, server: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """The status and the body of an answer; no body if it is too large."""
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
    """Reads a server's load from its metrics; not counted if they do not say it, or say nonsense.

    With several engines behind one address, requests add up and the use of their caches is averaged.
    """
    text = b"\n" + text
    running, waiting = _values(text, b"vllm:num_requests_running"), _values(text, b"vllm:num_requests_waiting")
    used = _values(text, b"vllm:kv_cache_usage_perc")
    if not running or not waiting or not all(0 <= each < math.inf for each in running + waiting + used):
        return ServerLoad(counted=False)
    return ServerLoad(sum(running), sum(waiting), min(1.0, sum(used) / len(used)) if used else 0.0)


def _values(text: bytes, name: bytes) -> list[float]:
    """The values of all series of a metric, NaN for what is no number. Found by name, as most lines are others."""
    values = list[float]()
    at = text.find(b"\n" + name)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        series = text[at + 1 + len(name) : end if end >= 0 else len(text)]
        if series[:1] == b"{":
            series = series[series.rfind(b"}") + 1 :]
        if series[:1] in (b" ", b"\t"):  # else it is another metric, whose name begins alike
            try:
                values.append(float(series.split()[0]))
            except (ValueError, IndexError):
                values.append(math.nan)
        at = text.find(b"\n" + name, at + 1)
    return values


class PollerThread:
    """A poller in a thread of its own, which tells what it hears in the event loop that started it.

    Args:
        hear: called in that loop.
        hear_models: in the same way; see `HttpAsker`.
    """

    def __init__(self, hear: Callable[[PollResult], None], hear_models: HearModels | None = None) -> None:
        self._owner = asyncio.get_running_loop()
        self._hear = hear
        self._hear_models = hear_models
        self._asker = HttpAsker(None if hear_models is None else self._pass_models_on)
        self.poller = Poller(self._asker, self._pass_on)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[NoReturn] = self._owner.create_future()
        self._thread = threading.Thread(target=self._main, name="polling", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    async def watch(self) -> NoReturn:
        """Waits until it does not ask any more though nobody stopped it.

        Raises:
            GatewayError: that is so.
        """
        await asyncio.shield(self._failure)
        raise AssertionError("it has no result")

    async def stop(self) -> None:
        """Asks no more, and returns when the thread has ended."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())
        await asyncio.to_thread(self._thread.join)

    def ask_as(self, authorizations: Mapping[str, tuple[str, ...]]) -> None:
        """What servers may want to be told in ``Authorization``, by their addresses; see `HttpAsker`."""
        self._asker.ask_as(authorizations)

    def _pass_models_on(self, server: str, answer: bytes, authorization: str) -> None:
        assert self._hear_models is not None
        self._owner.call_soon_threadsafe(self._hear_models, server, answer, authorization)

    def _pass_on(self, heard: PollResult) -> None:
        self._owner.call_soon_threadsafe(self._hear, heard)

    def _main(self) -> None:
        async def run() -> None:
            async with self._asker:
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
