"""What autoscalers read of each endpoint that is scaled: ``GET /scaling`` on the metrics port.

{"gateway": …, "uptimeSeconds": …, "endpoints": [{"namespace": …, "name": …, "held": …, "queued": …, "inFlight": …,
  "idleSeconds": …, "drained": …, "engines": [{"address": …, "running": …, "waiting": …, "kvUsage": …, "ready": …,
  "ageSeconds": …}]}]}
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.scaling.signals import EndpointKey
from stoker_gateway.ext_proc.hold import EndpointHold
from stoker_gateway.ext_proc.request_queue import RequestQueue
from stoker_gateway.scheduling.in_flight import ON_THE_WAY_S, InFlight
from stoker_gateway.scheduling.picker import EndpointPicker
from stoker_gateway.scheduling.server_pool import PooledServer

#: The most requests that are reported of an engine. What engines report of themselves is not trusted, and one number
#: that cannot be would make the autoscaler ignore all of the report.
_MAX_REQUESTS: Final = 1e6


@dataclass(frozen=True, slots=True)
class ServedName:
    """What there is of one of an endpoint's served names."""

    queue: RequestQueue
    picker: EndpointPicker
    in_flight: InFlight


def endpoint_report(
    key: EndpointKey, names: Iterable[ServedName], hold: EndpointHold | None, now: float
) -> dict[str, Any]:
    """The report of one InferenceEndpoint.

    Args:
        names: all of its served names.
        hold: the requests that it holds; None: it holds none.
    """
    names = list(names)
    held = sum(each.queue.num_held() for each in names)
    queued = sum(each.queue.num_queued() for each in names)
    in_flight = sum(len(each.in_flight) for each in names)
    report: dict[str, Any] = {
        "namespace": key[0],
        "name": key[1],
        "held": held,
        "queued": queued,
        "inFlight": in_flight,
    }
    if held or queued or in_flight:
        report["idleSeconds"] = 0.0
    elif hold is not None and hold.active_at is not None:
        report["idleSeconds"] = max(0.0, now - hold.active_at)
    if hold is not None and (word := _drained(hold, names, now)):
        report["drained"] = word
    report["engines"] = _engines(names, now)
    return report


def _drained(hold: EndpointHold, names: list[ServedName], now: float) -> str:
    """The announcement for which no request is sent and none is under way; empty: there is none."""
    word = hold.announcement(now)
    # What was picked just before is counted by now.
    if not word or now - hold.stopped_at < ON_THE_WAY_S:
        return ""
    return word if all(each.in_flight.is_none() for each in names) else ""


def _engines(names: list[ServedName], now: float) -> list[dict[str, Any]]:
    """The last report of each server that was asked. Its served names share it, so the newest counts."""
    newest: dict[str, PooledServer] = {}
    for each in names:
        for server, known in each.picker.states():
            before = newest.get(server)
            if math.isfinite(known.asked_at) and (before is None or known.asked_at > before.asked_at):
                newest[server] = known
    return [
        {
            "address": server,
            # A server that does not report it has what it was sent.
            "running": min(
                _MAX_REQUESTS, known.load.reported.running if known.load.reported.counted else known.load.sequences
            ),
            "waiting": min(_MAX_REQUESTS, known.load.reported.waiting),
            "kvUsage": known.load.reported.kv_usage,
            "ready": known.load.reported.ready,
            "ageSeconds": max(0.0, now - known.asked_at),
        }
        for server, known in newest.items()
    ]
