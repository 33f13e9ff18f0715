"""Support for scaling: reads Envoy's counts of active requests, makes the poller poll servers that requests wait for
more often, and creates the report for autoscalers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

import orjson

from stoker_gateway.envoy.admin import EnvoyAdmin
from stoker_gateway.errors import GatewayError
from stoker_gateway.ext_proc.server import PickerServer

logger = logging.getLogger(__name__)

#: Interval of the main loop, in seconds.
_CHECK_INTERVAL_S: Final = 0.1
#: Minimum interval of reads of Envoy's counts in seconds: while an endpoint drains, and otherwise.
_DRAINING_PERIOD_S: Final = 0.25
_PERIOD_S: Final = 2.0


class ScalingWatch:
    """Passes Envoy's counts of active requests to the picker, and creates the report for autoscalers. Used in one event
    loop.

    Args:
        identity: unique name of this process.
        is_known: returns whether the model registry is known.
        set_awaited: called with the servers that requests wait for, whenever they change.
    """

    def __init__(
        self,
        picker: PickerServer,
        envoy: EnvoyAdmin,
        identity: str,
        is_known: Callable[[], bool],
        set_awaited: Callable[[Iterable[str]], None],
    ) -> None:
        self._picker = picker
        self._envoy = envoy
        self._identity = identity
        self._is_known = is_known
        self._has_counted = False
        self._set_awaited = set_awaited
        self._began = time.monotonic()

    def report(self) -> bytes | None:
        """Return the report for autoscalers in JSON.

        It is None until the model registry and Envoy's counts are known, because the report would lack requests that an
        earlier picker routed."""
        if not self._has_counted:
            return None
        endpoints = self._picker.scaling_report()
        uptime_s = time.monotonic() - self._began
        return orjson.dumps({"gateway": self._identity, "uptimeSeconds": uptime_s, "endpoints": endpoints})

    async def watch(self) -> NoReturn:
        """Pass Envoy's counts to the picker, and the awaited servers to the poller, until cancelled."""
        awaited: set[str] = set()
        last_count = next_count = 0.0
        while True:
            if (now_awaited := self._picker.awaited()) != awaited:
                awaited = now_awaited
                self._set_awaited(sorted(awaited))
            now = time.monotonic()
            is_draining = self._picker.is_draining
            if is_draining:
                next_count = min(next_count, last_count + _DRAINING_PERIOD_S)
            is_first = not self._has_counted and self._is_known()
            if is_first or (now >= next_count and (is_draining or self._picker.needs_counts)):
                last_count, next_count = now, now + _PERIOD_S
                await self._count()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _count(self) -> None:
        requested_at = time.monotonic()
        try:
            active = await self._envoy.active_by_cluster()
        except GatewayError as error:
            logger.debug("the counts of active requests cannot be read: %s", error)
            return
        self._picker.counted(active, requested_at)
        self._has_counted = self._has_counted or self._is_known()
