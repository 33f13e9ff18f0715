"""The report for autoscalers, with an entry for each reported endpoint: ``GET /scaling`` on the metrics port.

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

#: Maximum number of requests reported for an engine. Engines' metrics are not trusted, and an impossible value would
#: make the autoscaler ignore the whole report.
_MAX_REQUESTS: Final = 1e6


@dataclass(frozen=True, slots=True)
class ServedName:
    """Queue, picker and counts of one of an endpoint's served names."""

    queue: RequestQueue
    picker: EndpointPicker
    in_flight: InFlight


def endpoint_report(
    key: EndpointKey, names: Iterable[ServedName], hold: EndpointHold | None, now: float
) -> dict[str, Any]:
    """Return the report of one InferenceEndpoint.

    Args:
        names: all served names of the endpoint.
        hold: the endpoint's hold; None means that its requests are not held.
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
    if hold is not None and (drain_id := _drained(hold, names, now)):
        report["drained"] = drain_id
    report["engines"] = _engines(names, now)
    return report


def _drained(hold: EndpointHold, names: list[ServedName], now: float) -> str:
    """Return the operator's drain id once no requests are sent and none is active; empty otherwise."""
    drain_id = hold.drain_id(now)
    # Envoy receives requests routed just before the stop within `ON_THE_WAY_S`, and then counts them.
    if not drain_id or now - hold.stopped_at < ON_THE_WAY_S:
        return ""
    return drain_id if all(each.in_flight.is_certainly_idle() for each in names) else ""


def _engines(names: list[ServedName], now: float) -> list[dict[str, Any]]:
    """Return the last report about each server that was polled. Served names may share servers, so the newest report is
    used."""
    newest: dict[str, PooledServer] = {}
    for each in names:
        for server, known in each.picker.states():
            before = newest.get(server)
            if math.isfinite(known.polled_at) and (before is None or known.polled_at > before.polled_at):
                newest[server] = known
    return [
        {
            "address": server,
            # If a server does not report its load, its active requests are estimated from those sent to it.
            "running": min(
                _MAX_REQUESTS, known.load.reported.running if known.load.reported.counted else known.load.sequences
            ),
            "waiting": min(_MAX_REQUESTS, known.load.reported.waiting),
            "kvUsage": known.load.reported.kv_usage,
            "ready": known.load.reported.ready,
            "ageSeconds": max(0.0, now - known.polled_at),
        }
        for server, known in newest.items()
    ]
