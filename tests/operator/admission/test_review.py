"""Reviews and their responses: over HTTPS as the API server sends them, evaluated by the operator's rules."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker_operator.admission.certificates import issue
from stoker_operator.admission.review import API_VERSION, Check, Malformed, ReviewVerdict, answer
from stoker_operator.admission.webhook import Webhook
from stoker_operator.api.violation import Violation
from stoker_operator.objects.owner import Owner
from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

from ...support.work import work

Document = dict[str, Any]

KIND = {"group": "stoker.dev", "version": "v1alpha1", "kind": "InferenceEndpoint"}
RESOURCE = {"group": "stoker.dev", "version": "v1alpha1", "resource": "inferenceendpoints"}

WRONG = Violation("spec.parallelism", "it needs 8 GPUs, 4 available", "use tensor: 4")


def review(new: Document | None, old: Document | None = None, **request: Any) -> Document:
    """Return a review as the API server sends it."""
    fields = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": KIND,
        "resource": RESOURCE,
        "operation": "CREATE" if old is None else "UPDATE",
        "name": "demo",
        "namespace": "default",
        "object": new,
        "oldObject": old,
        "userInfo": {"username": "admin"},
        "dryRun": False,
    }
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": fields | request}


def refuse(_new: Any, _old: Any) -> ReviewVerdict:
    return ReviewVerdict([WRONG])


def respond(request: Document, check: Check = refuse) -> Document:
    answered = answer(request, check)
    assert (answered["apiVersion"], answered["kind"]) == (API_VERSION, "AdmissionReview")
    response: Document = answered["response"]
    assert response["uid"] == request["request"]["uid"]
    return response


def test_violations_are_reported_in_the_api_servers_format(document: Callable[..., Document]) -> None:
    wrong = Violation("spec.model.source", "there is no such model", reason="ModelNotFound")
    response = respond(review(document()), lambda _new, _old: ReviewVerdict([WRONG, wrong], ["mind the gap"]))
    assert response["allowed"] is False
    assert response["warnings"] == ["mind the gap"]
    assert response["status"] == {
        "status": "Failure",
        "code": 422,
        "reason": "Invalid",
        "message": f"{WRONG}; {wrong}",
        "details": {
            "name": "demo",
            "group": "stoker.dev",
            "kind": "InferenceEndpoint",
            "causes": [
                {"reason": "FieldValueInvalid", "field": "spec.parallelism", "message": WRONG.sentence},
                {"reason": "ModelNotFound", "field": "spec.model.source", "message": "there is no such model"},
            ],
        },
    }


def test_warnings_do_not_refuse(document: Callable[..., Document]) -> None:
    response = respond(review(document()), lambda _new, _old: ReviewVerdict(warnings=["x" * 1000]))
    assert response["allowed"] is True
    assert response["warnings"] == ["x" * 256]


def test_changed_spec_is_checked_together_with_the_old_one(document: Callable[..., Document]) -> None:
    old, new = document(), document(replicas=2)
    seen: list[Any] = []

    def check(*documents: Any) -> ReviewVerdict:
        seen.append(documents)
        return ReviewVerdict([WRONG])

    assert respond(review(new, old), check)["allowed"] is False
    assert seen == [(new, old)]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {"team": "a"}},
        {"finalizers": ["example.com/mine"]},
        {"annotations": {"note": "x"}},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
def test_an_unchanged_spec_is_never_refused(document: Callable[..., Document], change: Document) -> None:
    old, new = document(), document()
    new["metadata"] |= change
    assert respond(review(new, old))["allowed"] is True


def test_endpoint_being_deleted_is_never_refused(document: Callable[..., Document]) -> None:
    old, new = document(), document(replicas=2)
    new["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert respond(review(new, old))["allowed"] is True
    assert respond(review(None, old, operation="DELETE"))["allowed"] is True


@pytest.mark.parametrize(
    "about",
    [
        {"subResource": "status"},
        {"subResource": "scale", "object": {"kind": "Scale"}},
        {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}},
        {"operation": "CONNECT"},
    ],
)
def test_reviews_of_other_objects_are_allowed(document: Callable[..., Document], about: Document) -> None:
    assert respond(review(document(), **about))["allowed"] is True


MALFORMED: list[Any] = [
    None,
    [],
    "text",
    {},
    {"request": None},
    {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {"uid": "1"}},
    {"apiVersion": API_VERSION, "kind": "Pod", "request": {"uid": "1"}},
    review({}, uid=None),
    review({}, uid=7),
    review({}, resource=None),
    review({}, object=[1]),
    review({}, object=None),
    review({"metadata": "x"}, operation="CREATE"),
    review({"metadata": {}, "spec": {}}, operation="UPDATE"),
]


@pytest.mark.parametrize("malformed", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_reviews_are_refused(malformed: Any) -> None:
    with pytest.raises(Malformed):
        answer(malformed, refuse)


# ---- over HTTPS


def served(
    check: Check, ask: Callable[[aiohttp.ClientSession, str], Awaitable[None]], folder: Path, metrics: Metrics
) -> None:
    """Run `ask` with a webhook that listens on loopback."""
    certificate = issue(("localhost",), datetime.now(UTC))
    (folder / "both").write_bytes(certificate.chain + certificate.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "both")

    async def main() -> None:
        webhook = Webhook("127.0.0.1:0", tls, check, metrics, grace=0)
        await webhook.start()
        trusting = ssl.create_default_context(cadata=certificate.authorities.decode())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
            await ask(session, f"https://localhost:{webhook.port}/validate")
        await webhook.stop()

    asyncio.run(main())


def test_malformed_requests_get_400_and_leave_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        bodies: list[bytes] = [json.dumps(each).encode() for each in MALFORMED]
        for body in (*bodies, b"", b"{", b"\xff\xfe", b"[" * 100_000):
            async with session.post(url, data=body) as response:
                assert response.status == 400, body[:80]
                assert await response.text()
        async with session.post(url, data=b"x" * (9 << 20)) as response:
            assert response.status == 413
        async with session.get(url) as response:
            assert response.status == 405

    metrics = Metrics()
    served(refuse, ask, tmp_path, metrics)
    assert not caplog.records
    assert b'stoker_operator_admissions_total{verdict="malformed"} 19.0' in metrics.text()


def test_internal_error_is_logged_and_left_to_the_failure_policy(
    tmp_path: Path, document: Callable[..., Document], caplog: pytest.LogCaptureFixture
) -> None:
    def check(_new: Any, _old: Any) -> ReviewVerdict:
        raise ZeroDivisionError

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(url, json=review(document())) as response:
            assert response.status == 500

    served(check, ask, tmp_path, Metrics())
    assert caplog.records[0].exc_info


def test_review_takes_a_bounded_amount_of_work(
    tmp_path: Path, document: Callable[..., Document], catalogue: Any
) -> None:
    """A review applies all rules for manifests, at a cost independent of earlier reviews."""

    def check(new: Any, _old: Any) -> ReviewVerdict:
        return ReviewVerdict(evaluate(Owner("demo", "default"), new, PlanningContext(catalogue)).violations)

    bad = document(engine={"runtime": "nonsense"})

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        for index in range(40):
            manifest, allowed = (document(replicas=index), True) if index % 2 else (bad, False)
            async with session.post(url, json=review(manifest)) as response:
                answered = await response.json()
            assert answered["response"]["allowed"] is allowed, answered

    metrics = Metrics()
    served(check, ask, tmp_path, metrics)
    assert b'stoker_operator_admissions_total{verdict="denied"} 20.0' in metrics.text()
    assert b'stoker_operator_admissions_total{verdict="allowed"} 20.0' in metrics.text()
    for body in (bad, document(replicas=40)):
        first, *later = (work(lambda body=body: answer(review(body), check)) for _ in range(20))  # type: ignore[misc]
        assert max(first, *later) < 50_000, "a review takes milliseconds"
        assert max(later) <= first + 100
