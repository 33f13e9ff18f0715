"""Answers AdmissionReviews, without I/O.

Only new endpoints and changes of the spec are checked. If an older version of the operator has accepted a spec that
this one refuses, users can still change the object's labels and finalizers, and delete it. `reconcile` repeats the
checks, because objects may have been accepted while the webhook did not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_operator.api.v1alpha1 import GROUP, KIND, PLURAL
from stoker_operator.api.violation import Violation

Object = Mapping[str, Any]

API_VERSION: Final = "admission.k8s.io/v1"

#: Maximum length of a warning in characters; the API server truncates longer ones.
_WARNING = 256


@dataclass(frozen=True)
class ReviewVerdict:
    """The verdict on an endpoint.

    Attributes:
        violations: why it is refused; empty if it is accepted.
        warnings: warnings to its author.
    """

    violations: Sequence[Violation] = ()
    warnings: Sequence[str] = ()


#: Evaluates an endpoint; the second argument is its previous version, None if it is new.
Check = Callable[[Object, Object | None], ReviewVerdict]


class Malformed(Exception):  # noqa: N818 - the review is wrong, not the operator
    """The review cannot be answered; the message states why."""


def answer(review: Any, check: Check) -> dict[str, Any]:
    """Return the AdmissionReview with its response.

    Raises:
        Malformed: `review` is not an AdmissionReview of `API_VERSION`.
    """
    request = _mapping(_mapping(review, "the body").get("request"), "request")
    if review.get("apiVersion") != API_VERSION or review.get("kind") != "AdmissionReview":
        kind = f"{review.get('apiVersion')} {review.get('kind')}"
        raise Malformed(f"the body is {kind}, not {API_VERSION} AdmissionReview")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise Malformed("request.uid is missing")
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    judged = objects_under_review(review)
    verdict = check(*judged) if judged else ReviewVerdict()
    if verdict.violations:
        response |= {"allowed": False, "status": _status(request, verdict.violations)}
    if verdict.warnings:
        response["warnings"] = [warning[:_WARNING] for warning in verdict.warnings]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def objects_under_review(review: Any) -> tuple[Object, Object | None] | None:
    """Return the endpoint to check and its previous version, or None if there is nothing to check.

    Raises:
        Malformed: `review` is not an AdmissionReview.
    """
    request = _mapping(_mapping(review, "the body").get("request"), "request")
    resource = _mapping(request.get("resource"), "request.resource")
    if (resource.get("group"), resource.get("resource")) != (GROUP, PLURAL) or request.get("subResource"):
        return None
    operation = request.get("operation")
    if operation not in ("CREATE", "UPDATE"):
        return None
    new = _mapping(request.get("object"), "request.object")
    old = _mapping(request.get("oldObject"), "request.oldObject") if operation == "UPDATE" else None
    if old is not None and old.get("spec") == new.get("spec"):
        return None
    metadata = _mapping(new.get("metadata"), "request.object.metadata")
    if metadata.get("deletionTimestamp"):
        return None
    return new, old


def _status(request: Object, violations: Sequence[Violation]) -> dict[str, Any]:
    """Return a Status like that of the API server's own validation, so that clients show both in the same way."""
    kind = request.get("kind")
    causes = [
        {
            "reason": "FieldValueInvalid" if each.reason == "Invalid" else each.reason,
            "field": each.field,
            "message": each.sentence,
        }
        for each in violations
    ]
    details = {"name": request.get("name") or "", "group": GROUP, "causes": causes}
    details["kind"] = kind.get("kind", KIND) if isinstance(kind, Mapping) else KIND
    return {
        "status": "Failure",
        "code": 422,
        "reason": "Invalid",
        "message": "; ".join(map(str, violations)),
        "details": details,
    }


def _mapping(value: Any, name: str) -> Object:
    if not isinstance(value, Mapping):
        raise Malformed(f"{name} is not an object")
    return value
