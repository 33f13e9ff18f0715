"""Answers an AdmissionReview. Pure: the review and what is in memory → the answer.

Only a change of the spec is judged. An object that was accepted by an older version stays writable otherwise: its
labels and finalizers are its users', and it must be deletable. What is refused here `reconcile` refuses again, which
sees everything, also what came while no webhook answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_operator.api.v1alpha1 import GROUP, KIND, PLURAL
from stoker_operator.api.violation import Violation

Object = Mapping[str, Any]

API_VERSION: Final = "admission.k8s.io/v1"

#: What the API server shows of a warning; it cuts longer ones itself.
_WARNING = 256


@dataclass(frozen=True)
class ReviewVerdict:
    """What is said of an endpoint.

    Attributes:
        violations: why it is refused; none: it is accepted.
        warnings: what is accepted and worth its author's attention.
    """

    violations: Sequence[Violation] = ()
    warnings: Sequence[str] = ()


#: Judges an endpoint, given what it was before (None: it is new).
Check = Callable[[Object, Object | None], ReviewVerdict]


class Malformed(Exception):  # noqa: N818 - it is the review that is wrong, not we
    """This is no review that could be answered; the message says why."""


def answer(review: Any, check: Check) -> dict[str, Any]:
    """The AdmissionReview with its response.

    Raises:
        Malformed: `review` is none.
    """
    request = _mapping(_mapping(review, "the body").get("request"), "request")
    if review.get("apiVersion") != API_VERSION or review.get("kind") != "AdmissionReview":
        raise Malformed(f"this is {review.get('apiVersion')} {review.get('kind')}, not {API_VERSION} AdmissionReview")
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
    """The endpoint to be judged, and what it was before; None where there is nothing to judge.

    Raises:
        Malformed: `review` is none.
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
    """A Status as the API server makes it of its own validation, so that clients show both alike."""
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
        raise Malformed(f"{name} is no object")
    return value
