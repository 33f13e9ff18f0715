"""Client of Envoy's admin interface: state, statistics and draining."""

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

#: Interval of the checks of a waiting method, in seconds.
STEP_S: Final = 0.1
#: Timeout of a request, in seconds.
_TIMEOUT_S: Final = 5
#: Interval of health checks in seconds, and the number of consecutive failures after which `watch` raises an error.
_CHECK_INTERVAL_S: Final = 3
_MAX_FAILURES: Final = 5
#: Statistic with the number of healthy pickers.
_HEALTHY_PICKERS: Final = f"cluster.{PICKER}.membership_healthy"
#: Statistics of requests that a cluster's servers process, or that wait for a connection to one.
_ACTIVE: Final = re.compile(r"cluster\.(.+)\.upstream_rq_(?:pending_)?active: (\d+)")


class EnvoyError(GatewayError):
    """Envoy cannot be started, does not work, or has exited."""


class LateAnswerError(EnvoyError):
    """Envoy runs, but did not answer within the timeout."""


class EnvoyAdmin:
    """Admin interface of a running Envoy."""

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings

    async def is_live(self) -> bool:
        """Return whether Envoy serves requests."""
        try:
            return (await self.request("GET", "/ready")).strip() == "LIVE"
        except EnvoyError:
            return False

    async def until_live(self, deadline_s: float = 60) -> None:
        """Wait until Envoy serves requests.

        Raises:
            EnvoyError: Envoy does not become ready within `deadline_s` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while not await self.is_live():
            if loop.time() > deadline:
                raise EnvoyError(f"Envoy did not become ready within {deadline_s:g} s")
            await asyncio.sleep(STEP_S)

    async def until_picker_reached(self) -> None:
        """Wait until Envoy has a healthy picker.

        Raises:
            EnvoyError: Envoy does not answer.
        """
        while True:
            with suppress(LateAnswerError):
                if await self.statistic(_HEALTHY_PICKERS):
                    return
            await asyncio.sleep(STEP_S)

    async def request(self, method: str, path: str) -> str:
        """Send a request and return the response's body.

        Raises:
            LateAnswerError: the response takes longer than `_TIMEOUT_S`.
            EnvoyError: Envoy does not answer.
        """
        connector = aiohttp.UnixConnector(path=str(self._settings.admin_socket))
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://envoy{path}") as answer,
            ):
                return await answer.text()
        except TimeoutError as error:
            raise LateAnswerError(f"Envoy's admin interface did not answer within {_TIMEOUT_S} s") from error
        except (OSError, aiohttp.ClientError) as error:
            raise EnvoyError(f"Envoy's admin interface does not answer: {error!r}") from error

    async def port(self) -> int:
        """Return the port of the clients' listener."""
        listeners = json.loads(await self.request("GET", "/listeners?format=json"))
        return int(listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])

    async def prometheus(self) -> str:
        """Return Envoy's metrics in Prometheus' format.

        Raises:
            EnvoyError: Envoy does not answer.
        """
        return await self.request("GET", "/stats/prometheus")

    async def active_requests(self) -> int:
        """Return the number of active requests of clients."""
        return await self.statistic(f"http.{LISTENER}.downstream_rq_active")

    async def statistic(self, name: str) -> int:
        """Return the value of a statistic; 0 if it does not exist.

        Raises:
            EnvoyError: Envoy does not answer.
        """
        return int((await self.request("GET", f"/stats?filter=^{name}$")).rpartition(":")[2] or 0)

    async def active_by_cluster(self) -> dict[str, int]:
        """Return the number of active requests of each cluster that has any.

        Raises:
            EnvoyError: Envoy does not answer, or its answer lacks these statistics.
        """
        answer = await self.request("GET", "/stats?filter=upstream_rq_(pending_)?active$")
        found = [match for line in answer.split("\n") if (match := _ACTIVE.fullmatch(line.strip())) is not None]
        if not found:  # the picker's cluster always has them, so an empty response does not mean 0
            raise EnvoyError("Envoy's statistics have no counts of active requests")
        active: dict[str, int] = {}
        for match in found:
            if match[2] != "0":
                active[match[1]] = active.get(match[1], 0) + int(match[2])
        return active

    async def watch(self) -> NoReturn:
        """Check periodically that Envoy answers and reaches the picker. Call it after Envoy and the picker are ready.

        Raises:
            EnvoyError: several consecutive checks failed.
        """
        num_failures, problem = 0, ""
        while num_failures < _MAX_FAILURES:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            try:
                reached = await self.statistic(_HEALTHY_PICKERS)
                problem = "" if reached else "Envoy does not reach the picker"
            except EnvoyError as error:
                problem = str(error)
            num_failures = num_failures + 1 if problem else 0
        raise EnvoyError(problem)

    async def withdraw(self, timeout_s: float) -> None:
        """Make ``/ready`` fail, and make Envoy close each connection after its next response. Envoy still accepts new
        connections.

        Raises:
            EnvoyError: Envoy does not answer.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.retry_while_late(lambda: self.request("POST", "/healthcheck/fail"), deadline)

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting connections and wait for active requests. Return the number of requests that are still active
        after `timeout_s`.

        If Envoy answers too late, because the machine is busy, the request to Envoy is repeated.

        Raises:
            EnvoyError: Envoy is not running.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.withdraw(timeout_s)
        await self.retry_while_late(lambda: self.request("POST", "/drain_listeners"), deadline)
        while num_active := await self.retry_while_late(self.active_requests, deadline):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(STEP_S)
        return num_active

    @staticmethod
    async def retry_while_late(send: Callable[[], Awaitable[_T]], deadline: float) -> _T:
        """Repeat a request to Envoy while it times out.

        Args:
            send: sends the request.
            deadline: time from which a timeout is not retried, by the running loop's clock.

        Raises:
            EnvoyError: Envoy is not running, or the request still times out at the deadline.
        """
        while True:
            try:
                return await send()
            except LateAnswerError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
