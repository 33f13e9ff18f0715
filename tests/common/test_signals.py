"""Reports of gateway replicas: validation, limits, sums."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from stoker_common.scaling.signals import GatewayReport, SignalsError, combine, parse_report
from stoker_operator.objects.facts import Key

KEY = Key("default", "demo")


def _engine(**fields: Any) -> dict[str, Any]:
    engine = {"address": "10.0.0.7:8000", "running": 3, "waiting": 1, "kvUsage": 0.5, "ready": True, "ageSeconds": 0.4}
    return engine | fields


def _document(**fields: Any) -> dict[str, Any]:
    endpoint = {"namespace": "default", "name": "demo", "held": 1, "queued": 2, "inFlight": 4, "idleSeconds": 0.0}
    endpoint |= {"drained": "", "engines": [_engine()]} | fields
    return {"gateway": "gateway-1", "uptimeSeconds": 812.4, "endpoints": [endpoint]}


def _report(**fields: Any) -> GatewayReport:
    return parse_report(json.dumps(_document(**fields)).encode())


def test_report_is_parsed() -> None:
    endpoint = _report().endpoints[KEY]
    assert (endpoint.held, endpoint.queued, endpoint.in_flight, endpoint.idle_seconds) == (1, 2, 4, 0.0)
    assert endpoint.engines["10.0.0.7:8000"].kv_usage == 0.5


HOSTILE: tuple[Any, ...] = (-1, -0.5, float("nan"), float("inf"), 1e300, 10**400, True, "3", [], {}, None)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("field", ["held", "queued", "inFlight", "running", "waiting", "kvUsage", "ageSeconds"])
def test_impossible_numbers_are_refused(field: str, value: Any) -> None:
    fields = {field: value} if field in ("held", "queued", "inFlight") else {"engines": [_engine(**{field: value})]}
    with pytest.raises(SignalsError, match=field):
        parse_report(json.dumps(_document(**fields)).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"gateway": "g", "uptimeSeconds": 1, "endpoints": {}}',
        b'{"gateway": "g", "uptimeSeconds": 1, "endpoints": [1]}',
        b'{"gateway": 7, "uptimeSeconds": 1}',
        b'{"gateway": "g", "uptimeSeconds": ' + b"9" * 5000 + b"}",
        b" " * (16 * 2**20 + 1),
    ],
    ids=range(11),
)
def test_malformed_reports_are_refused(body: bytes) -> None:
    with pytest.raises(SignalsError):
        parse_report(body)


def test_too_many_entries_are_refused() -> None:
    engines = [_engine(address=str(number)) for number in range(20_001)]
    with pytest.raises(SignalsError, match="20001"):
        _report(engines=engines)
    document = _document(engines=[])
    document["endpoints"] = [document["endpoints"][0] | {"name": str(number)} for number in range(10_001)]
    with pytest.raises(SignalsError, match="10001"):
        parse_report(json.dumps(document).encode())
    document["endpoints"] = [_document()["endpoints"][0]] * 2
    with pytest.raises(SignalsError, match="twice"):
        parse_report(json.dumps(document).encode())


@pytest.mark.parametrize("seed", range(200))
def test_mutated_reports_are_parsed_or_refused(seed: int) -> None:
    generator = random.Random(seed)
    body = bytearray(json.dumps(_document()).encode())
    for _ in range(generator.randint(1, 6)):
        body[generator.randrange(len(body))] = generator.randrange(256)
    try:
        report = parse_report(bytes(body))
    except SignalsError:
        return
    for endpoint in report.endpoints.values():
        assert endpoint.held >= 0 and endpoint.queued >= 0 and endpoint.in_flight >= 0
        assert all(0 <= engine.kv_usage <= 1 for engine in endpoint.engines.values())


def test_reports_are_summed_and_engines_counted_once_by_their_newest_report() -> None:
    older = _report(held=2, idleSeconds=9.0, drained="w", engines=[_engine(running=9, ageSeconds=3)])
    newer = _report(held=3, idleSeconds=4.0, drained="w", engines=[_engine(running=1, ageSeconds=1)])
    for reports in ({"a": older, "b": newer}, {"b": newer, "a": older}):
        signals = combine(reports, KEY)
        assert (signals.held, signals.queued, signals.in_flight, signals.idle_seconds) == (5, 4, 8, 4.0)
        assert signals.engines["10.0.0.7:8000"].running == 1
        assert signals.missing == () and signals.drained == ("w", "w")


def test_silent_replica_is_missing_and_unknown_endpoint_is_zero() -> None:
    signals = combine({"a": _report(), "b": None}, KEY)
    assert signals.missing == ("b",) and signals.held == 1
    unknown = combine({"a": _report()}, Key("default", "other"))
    assert (unknown.held, unknown.in_flight, unknown.missing, unknown.drained) == (0, 0, (), ("",))
    assert unknown.idle_seconds == 812.4, "no request since the replica started"
    assert combine({}, KEY).missing == ("gateway",)


def test_acknowledgement_needs_all_replicas_and_no_requests() -> None:
    idle = {"held": 0, "queued": 0, "inFlight": 0, "engines": []}
    drained = _report(drained="w", **idle)
    assert combine({"a": drained, "b": drained}, KEY).acknowledged("w")
    assert not combine({"a": drained}, KEY).acknowledged("v")
    assert not combine({"a": drained}, KEY).acknowledged("")
    assert not combine({}, KEY).acknowledged("w")
    others = (None, _report(**idle), _report(drained="w", **(idle | {"inFlight": 1})))
    for other in (*others, _report(drained="w", **(idle | {"engines": [_engine()]}))):
        assert not combine({"a": drained, "b": other}, KEY).acknowledged("w")
