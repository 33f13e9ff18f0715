"""What scaling needs beside the requests themselves: Envoy's counts of requests under way, polls of the servers that
requests wait for, and the report for the autoscaler.
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

#: Seconds between looks for what is to be done.
_LOOK_S: Final = 0.1
#: Seconds between two of Envoy's counts, while the end of requests is waited for and otherwise.
_DRAINING_PERIOD_S: Final = 0.25
_PERIOD_S: Final = 2.0


class ScalingWatch:
    """Keeps the picker informed, and reports to the autoscaler. Lives in one event loop.

    Args:
        identity: what tells this gateway from others.
        is_known: whether it is known what is served.
        set_awaited: told which servers requests wait for.
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
        """What the autoscaler reads, in JSON; None as long as it is not known what is served, or what an earlier picker
        sent: that would be a report of nothing, and not of what there is."""
        if not self._has_counted:
            return None
        endpoints = self._picker.scaling_report()
        uptime_s = time.monotonic() - self._began
        return orjson.dumps({"gateway": self._identity, "uptimeSeconds": uptime_s, "endpoints": endpoints})

    async def watch(self) -> NoReturn:
        """Keeps the picker informed until it is cancelled."""
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
            await asyncio.sleep(_LOOK_S)

    async def _count(self) -> None:
        asked_at = time.monotonic()
        try:
            active = await self._envoy.active_by_cluster()
        except GatewayError as error:
            logger.debug("the counts of active requests cannot be read: %s", error)
            return
        self._picker.counted(active, asked_at)
        self._has_counted = self._has_counted or self._is_known()
