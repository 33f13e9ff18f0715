"""Polls all gateway replicas for their reports (``GET /scaling``).

The name of a headless Service resolves to the replicas, including starting and terminating ones. Responses are not
trusted: their size and time are limited, and a replica with an invalid response counts as missing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from stoker_common.bounded_fetch import fetch
from stoker_common.scaling.signals import MAX_BYTES, GatewayReport, SignalsError, parse_report

logger = logging.getLogger(__name__)

#: Time limits of a request or DNS lookup, and of a wait of `poll` for pending ones, in seconds.
_TIMEOUT_S: Final = 2.0
_WAIT_S: Final = 0.3
#: Seconds for which a report is valid after its request was sent.
_FRESH_S: Final = 2.5
#: Maximum number of replicas that are polled. Further replicas count as missing.
_MAX_REPLICAS: Final = 64
#: Maximum size of a report that is parsed in the event loop, in bytes.
_SMALL_BYTES: Final = 64 << 10


class GatewaySignals:
    """The reports of the gateway's replicas. Used in one event loop.

    Args:
        service: ``HOST:PORT``; the name resolves to the addresses of all replicas.
    """

    def __init__(self, service: str) -> None:
        host, _, port = service.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._addresses: tuple[str, ...] = ()
        self._logged_problems: dict[str, str] = {}
        self._reports: dict[str, tuple[float, GatewayReport]] = {}  # replica → time of the request, newest report
        self._tasks: dict[str, asyncio.Task[None]] = {}  # pending requests by replica, and "": the DNS lookup

    async def poll(self) -> dict[str, GatewayReport | None]:
        """Return each replica's newest report by its address; None if the replica has no valid report. A slow replica
        delays the reports of others by at most `_WAIT_S`."""
        self._start("", self._look_up)
        if not self._addresses:
            await self._wait()
        for address in self._addresses[:_MAX_REPLICAS]:
            self._start(address, partial(self._fetch_report, address))
        await self._wait()
        oldest = asyncio.get_running_loop().time() - _FRESH_S
        reports = {address: self._reports.get(address, (-math.inf, None)) for address in self._addresses}
        return {address: report if sent_at >= oldest else None for address, (sent_at, report) in reports.items()}

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def _wait(self) -> None:
        await asyncio.wait(self._tasks.values(), timeout=_WAIT_S)

    async def close(self) -> None:
        """Cancel pending requests."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look_up(self) -> None:
        """Look up the replicas. If the lookup fails, the known replicas are still polled."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            self._log_problem("name", f"cannot look up the gateway's replicas by {self._host}: {error}")
            return
        self._logged_problems.pop("name", None)
        hosts = {f"[{address[0]}]" if family == socket.AF_INET6 else address[0] for family, _, _, _, address in found}
        self._addresses = tuple(f"{host}:{self._port}" for host in sorted(hosts))
        for known in (self._logged_problems, self._reports, self._tasks):
            for address in known.keys() - {"", "name", *self._addresses}:
                del known[address]

    async def _fetch_report(self, address: str) -> None:
        sent_at = asyncio.get_running_loop().time()
        body = await fetch(f"http://{address}/scaling", _TIMEOUT_S, MAX_BYTES)
        try:
            if body is None:
                raise SignalsError("GET /scaling failed, timed out, or returned an error or too many bytes")
            # A large report must not block the event loop.
            parsed = parse_report(body) if len(body) <= _SMALL_BYTES else await asyncio.to_thread(parse_report, body)
            self._reports[address] = sent_at, parsed
        except SignalsError as error:
            self._log_problem(address, f"no report from the gateway's replica at {address}: {error}")
            self._reports.pop(address, None)
        else:
            self._logged_problems.pop(address, None)

    def _log_problem(self, subject: str, message: str) -> None:
        """Log a problem once until it is resolved."""
        if subject not in self._logged_problems:
            logger.warning("%s", message)
        self._logged_problems[subject] = message
