"""The reports of the gateway's replicas (``GET /scaling``): a strict parser, and the sum of all replicas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

#: Metrics by which an endpoint can be scaled.
Metric = Literal["pendingRequests", "runningRequests", "kvCacheUsage"]
#: Namespace and name of an InferenceEndpoint.
EndpointKey = tuple[str, str]

#: Maximum size of a report in bytes, and maximum number of endpoints and of engines in it.
MAX_BYTES: Final = 16 * 2**20
MAX_ENDPOINTS: Final = 10_000
MAX_ENGINES: Final = 20_000
#: Maximum length of a name, an address or a drain id, in characters.
MAX_TEXT: Final = 512
#: Maximum plausible number of requests, and of seconds.
MAX_COUNT: Final = 10**9
MAX_SECONDS: Final = 1e9
#: Age in seconds beyond which an engine's report counts as missing.
STALE_SECONDS: Final = 15.0


class SignalsError(ValueError):
    """A report is missing or malformed, or contains an implausible number."""


@dataclass(frozen=True)
class EngineReport:
    """The load that an engine (a server of the endpoint) reported last.

    Attributes:
        running, waiting: number of requests in its batch, and in its queue; an estimate and 0 if it reports no load.
        kv_usage: used fraction of its KV cache, from 0 to 1.
        ready: whether it accepts requests.
        age_seconds: age of the report.
    """

    running: float
    waiting: float
    kv_usage: float
    ready: bool
    age_seconds: float


@dataclass(frozen=True)
class EndpointReport:
    """A gateway replica's report about one endpoint.

    Attributes:
        held: number of requests that wait because no pod is available.
        queued: number of requests that wait because all pods are full.
        in_flight: number of requests that were sent to a pod and have not ended.
        idle_seconds: time since the last request arrived or ended, 0 while there is one; None if there was none since
            the replica started, or if the endpoint's requests are never held.
        drained: the drain id that the replica acknowledges: it sends no requests and has none in flight; empty if it
            acknowledges none.
        engines: the engines' reports, by address.
    """

    held: int
    queued: int
    in_flight: int
    idle_seconds: float | None
    drained: str
    engines: Mapping[str, EngineReport]


@dataclass(frozen=True)
class GatewayReport:
    """A gateway replica's report."""

    gateway: str
    uptime_seconds: float
    endpoints: Mapping[EndpointKey, EndpointReport]


@dataclass(frozen=True)
class Signals:
    """The combined reports of all gateway replicas about one endpoint.

    Attributes:
        held, queued, in_flight: sums, see `EndpointReport`.
        idle_seconds: the shortest of all replicas; a replica that reports none is idle since its start. None if no
            replica has a report.
        engines: the newest report of each engine, by address.
        drained: one string per replica with a report: the drain id that it acknowledges, or an empty string.
        missing: replicas without a valid report, or ``gateway`` if there are no replicas.
    """

    held: int = 0
    queued: int = 0
    in_flight: int = 0
    idle_seconds: float | None = None
    engines: Mapping[str, EngineReport] = field(default_factory=dict)
    drained: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def waiting(self) -> float:
        """Number of requests in the gateway's and the engines' queues."""
        return self.held + self.queued + sum(engine.waiting for engine in self.engines.values())

    @property
    def is_busy(self) -> bool:
        """Whether the gateway or an engine has a request."""
        return bool(self.held or self.queued or self.in_flight) or any(
            engine.running or engine.waiting for engine in self.engines.values()
        )

    def measure(self, metric: Metric) -> tuple[float, float]:
        """Return the endpoint's value of a metric: a number of requests or, for kvCacheUsage, the sum of the used
        fractions.

        Returns:
            (the part of running requests, the part of waiting requests). The second part is 0 except for
            pendingRequests.
        """
        engines = self.engines.values()
        if metric == "kvCacheUsage":
            return math.fsum(engine.kv_usage for engine in engines), 0.0
        if metric == "runningRequests":
            return math.fsum(engine.running for engine in engines), 0.0
        in_engines = math.fsum(engine.waiting for engine in engines)
        return max(0.0, self.in_flight - in_engines), self.held + self.queued + in_engines

    def num_reporting(self) -> int:
        """Return the number of engines with a recent report."""
        return sum(engine.age_seconds <= STALE_SECONDS for engine in self.engines.values())

    def acknowledged(self, drain: str) -> bool:
        """Whether all replicas acknowledge this drain id, and neither the gateway nor an engine has a request."""
        return (
            bool(drain and self.drained)
            and not self.missing
            and not self.is_busy
            and all(drain_id == drain for drain_id in self.drained)
        )


def parse_report(body: bytes) -> GatewayReport:
    """Parse the response of `GET /scaling`.

    Raises:
        SignalsError: the report is too long or malformed, or a number is negative, not finite or too large.
    """
    if len(body) > MAX_BYTES:
        raise SignalsError(f"the report has {len(body)} bytes, more than {MAX_BYTES}")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise SignalsError(f"the report is not JSON: {type(error).__name__}") from None
    report = _mapping(document, "the report")
    endpoints: dict[EndpointKey, EndpointReport] = {}
    num_engines = 0
    for entry in _list(report, "endpoints", MAX_ENDPOINTS):
        item = _mapping(entry, "an endpoint")
        key = (_text(item, "namespace"), _text(item, "name"))
        if key in endpoints:
            raise SignalsError(f"{key[0]}/{key[1]} is reported twice")
        endpoints[key] = _endpoint(item)
        num_engines += len(endpoints[key].engines)
        if num_engines > MAX_ENGINES:
            raise SignalsError(f"more than {MAX_ENGINES} engines are reported")
    return GatewayReport(_text(report, "gateway"), _number(report, "uptimeSeconds", MAX_SECONDS), endpoints)


def combine(reports: Mapping[str, GatewayReport | None], key: EndpointKey) -> Signals:
    """Combine the reports of all replicas about an endpoint.

    Args:
        reports: each replica's report by its address; None means that it has no valid report.
        key: the endpoint. A report without this endpoint counts as zero requests.
    """
    held = queued = in_flight = 0
    idle = list[float]()
    engines: dict[str, EngineReport] = {}
    drained = list[str]()
    missing = [address for address, report in reports.items() if report is None] if reports else ["gateway"]
    for report in reports.values():
        if report is None:
            continue
        endpoint = report.endpoints.get(key)
        if endpoint is None:
            idle.append(report.uptime_seconds)
            drained.append("")
            continue
        held += endpoint.held
        queued += endpoint.queued
        in_flight += endpoint.in_flight
        idle.append(report.uptime_seconds if endpoint.idle_seconds is None else endpoint.idle_seconds)
        drained.append(endpoint.drained)
        for address, engine in endpoint.engines.items():
            if address not in engines or engine.age_seconds < engines[address].age_seconds:
                engines[address] = engine
    shortest = min(idle, default=None)
    return Signals(held, queued, in_flight, shortest, engines, tuple(drained), tuple(sorted(missing)))


def _endpoint(item: Mapping[str, Any]) -> EndpointReport:
    engines: dict[str, EngineReport] = {}
    for entry in _list(item, "engines", MAX_ENGINES):
        engine = _mapping(entry, "an engine")
        ready = engine.get("ready")
        if not isinstance(ready, bool):
            raise SignalsError("ready must be true or false")
        address = _text(engine, "address")
        if address in engines:
            raise SignalsError(f"engine {address} is reported twice")
        engines[address] = EngineReport(
            running=_number(engine, "running", MAX_COUNT),
            waiting=_number(engine, "waiting", MAX_COUNT),
            kv_usage=_number(engine, "kvUsage", 1.0),
            ready=ready,
            age_seconds=_number(engine, "ageSeconds", MAX_SECONDS),
        )
    idle = item.get("idleSeconds")
    return EndpointReport(
        held=_count(item, "held"),
        queued=_count(item, "queued"),
        in_flight=_count(item, "inFlight"),
        idle_seconds=None if idle is None else _number(item, "idleSeconds", MAX_SECONDS),
        drained=_text(item, "drained") if item.get("drained") is not None else "",
        engines=engines,
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SignalsError(f"{what} must be an object")
    return value


def _list(item: Mapping[str, Any], name: str, limit: int) -> list[Any]:
    value = item.get(name, [])
    if not isinstance(value, list):
        raise SignalsError(f"{name} must be a list")
    if len(value) > limit:
        raise SignalsError(f"{name} has {len(value)} entries, more than {limit}")
    return value


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise SignalsError(f"{name} must be a text of at most {MAX_TEXT} characters")
    return value


def _number(item: Mapping[str, Any], name: str, limit: float) -> float:
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:  # NaN fails too
        raise SignalsError(f"{name} must be a number from 0 to {limit:g}")
    return float(value)


def _count(item: Mapping[str, Any], name: str) -> int:
    value = _number(item, name, MAX_COUNT)
    if value != math.floor(value):
        raise SignalsError(f"{name} must be a whole number")
    return int(value)
