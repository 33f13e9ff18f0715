"""A client of Envoy's administration interface: its state, its statistics, and how it is drained."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

import aiohttp

from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.envoy.values import LISTENER, PICKER
from stoker_gateway.errors import GatewayError

_T = TypeVar("_T")

#: Seconds between looks while something is awaited.
STEP_S: Final = 0.1
#: Seconds that it may take to answer.
_ANSWER_S: Final = 5
#: Seconds between checks whether Envoy does its work, and how many may fail in a row.
_LOOK_S: Final = 3
_LOOKS: Final = 5
#: The statistic that counts the pickers that Envoy reaches and that serve.
_REACHED: Final = f"cluster.{PICKER}.membership_healthy"
#: The statistics that count requests that a cluster's servers have, or that wait for a connection to one.
_ACTIVE: Final = re.compile(r"cluster\.(.+)\.upstream_rq_(?:pending_)?active: (\d+)")


class EnvoyError(GatewayError):
    """Envoy cannot be started, does not do its work, or has ended."""


class LateAnswerError(EnvoyError):
    """Envoy is there, and did not answer in time."""


class EnvoyAdmin:
    """A running Envoy, by its administration interface."""

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings

    async def is_live(self) -> bool:
        """Whether it serves."""
        try:
            return (await self.ask("GET", "/ready")).strip() == "LIVE"
        except EnvoyError:
            return False

    async def until_live(self, deadline_s: float = 60) -> None:
        """Waits until it serves.

        Raises:
            EnvoyError: it does not.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while not await self.is_live():
            if loop.time() > deadline:
                raise EnvoyError(f"Envoy did not become ready within {deadline_s:g} s")
            await asyncio.sleep(STEP_S)

    async def until_it_reaches_the_picker(self) -> None:
        """Waits until requests are decided.

        Raises:
            EnvoyError: it does not answer.
        """
        while True:
            with suppress(LateAnswerError):
                if await self.statistic(_REACHED):
                    return
            await asyncio.sleep(STEP_S)

    async def ask(self, method: str, path: str) -> str:
        """Envoy's administration's answer.

        Raises:
            LateAnswerError: it takes more than `_ANSWER_S`.
            EnvoyError: it does not answer.
        """
        connector = aiohttp.UnixConnector(path=str(self._settings.admin_socket))
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://envoy{path}") as answer,
            ):
                return await answer.text()
        except TimeoutError as error:
            raise LateAnswerError(f"Envoy's admin interface did not answer within {_ANSWER_S} s") from error
        except (OSError, aiohttp.ClientError) as error:
            raise EnvoyError(f"Envoy's admin interface does not answer: {error!r}") from error

    async def port(self) -> int:
        """The port that clients reach it at."""
        listeners = json.loads(await self.ask("GET", "/listeners?format=json"))
        return int(listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])

    async def prometheus(self) -> str:
        """Its metrics, as Prometheus reads them.

        Raises:
            EnvoyError: it does not answer.
        """
        return await self.ask("GET", "/stats/prometheus")

    async def active_requests(self) -> int:
        """How many requests of clients are under way."""
        return await self.statistic(f"http.{LISTENER}.downstream_rq_active")

    async def statistic(self, name: str) -> int:
        """What it counts under this name; 0 where there is no such thing.

        Raises:
            EnvoyError: it does not answer.
        """
        return int((await self.ask("GET", f"/stats?filter=^{name}$")).rpartition(":")[2] or 0)

    async def active_by_cluster(self) -> dict[str, int]:
        """How many requests are under way to the servers of each cluster that has any.

        Raises:
            EnvoyError: it does not answer.
        """
        answer = await self.ask("GET", "/stats?filter=upstream_rq_(pending_)?active$")
        found = [match for line in answer.split("\n") if (match := _ACTIVE.fullmatch(line.strip())) is not None]
        if not found:  # it has at least the picker's: an answer without any is no count of 0
            raise EnvoyError("Envoy's statistics have no counts of active requests")
        active: dict[str, int] = {}
        for match in found:
            if match[2] != "0":
                active[match[1]] = active.get(match[1], 0) + int(match[2])
        return active

    async def watch(self) -> NoReturn:
        """Checks, once Envoy serves, that it does its work.

        Raises:
            EnvoyError: it does not.
        """
        num_failures, problem = 0, ""
        while num_failures < _LOOKS:
            await asyncio.sleep(_LOOK_S)
            try:
                reached = await self.statistic(_REACHED)
                problem = "" if reached else "Envoy does not reach the picker"
            except EnvoyError as error:
                problem = str(error)
            num_failures = num_failures + 1 if problem else 0
        raise EnvoyError(problem)

    async def withdraw(self, timeout_s: float) -> None:
        """Has ``/ready`` fail, and each connection closed with its next answer. New connections are still accepted.

        Raises:
            EnvoyError: it does not answer.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.retry_while_late(lambda: self.ask("POST", "/healthcheck/fail"), deadline)

    async def drain(self, timeout_s: float) -> int:
        """Takes no new connections, and waits for requests under way; returns how many have not ended.

        An answer that is late (the machine is busy) breaks off no request: it is asked again.

        Raises:
            EnvoyError: it is not there.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.withdraw(timeout_s)
        await self.retry_while_late(lambda: self.ask("POST", "/drain_listeners"), deadline)
        while num_active := await self.retry_while_late(self.active_requests, deadline):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(STEP_S)
        return num_active

    @staticmethod
    async def retry_while_late(ask: Callable[[], Awaitable[_T]], deadline: float) -> _T:
        """Repeats a request to Envoy while its answers are late.

        Args:
            ask: sends the request.
            deadline: until when, in the running loop's time.

        Raises:
            EnvoyError: Envoy is not there, or its answers are late at the deadline.
        """
        while True:
            try:
                return await ask()
            except LateAnswerError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
