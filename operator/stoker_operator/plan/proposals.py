"""Refusals of a plan and the remedies that they propose.

A proposal that can be planned is planned first, and omitted if it would be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from stoker_operator.api.rule import violations
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Violation


@dataclass(frozen=True)
class Proposal:
    """A proposed remedy.

    Attributes:
        text: the sentence for the user.
        change: fields of the spec that it sets, as in a manifest; a field with value None is removed. `change` is None
            if the proposal has been planned already, or cannot be planned.
        also: short text for use after another proposal of the same kind ("use float32" or "float16").
        config: the config.json of the model that it names; None if the model stays or is not known.
    """

    text: str
    change: Mapping[str, Any] | None = None
    also: str = ""
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Refusal:
    """A `Violation` without its remedy.

    Attributes:
        field, message, reason: as in `Violation`.
        proposals: creates the proposals, in the order of the message.
        otherwise: remedy if no proposal is possible.
        joined: separator between proposals.
    """

    field: str
    message: str
    reason: str
    proposals: Callable[[], Iterable[Proposal]]
    otherwise: str
    joined: str = ", or "

    def violation(self, is_possible: Callable[[Refusal, Proposal], bool] | None) -> Violation:
        """Return the violation with the possible proposals.

        Args:
            is_possible: returns whether a proposal is possible; None omits the remedy.
        """
        if is_possible is None:
            return Violation(self.field, self.message, reason=self.reason)
        remedy, before = "", ""
        for each in self.proposals():
            if each.change is None or is_possible(self, each):
                also = f" or {each.also}" if before and each.also else ""
                remedy += also or f"{self.joined if remedy else ''}{each.text}"
                before = each.also
        return Violation(self.field, self.message, remedy or self.otherwise, reason=self.reason)


def changed(spec: Spec, change: Mapping[str, Any]) -> Spec | None:
    """Return the spec with a change, or None if the result violates the rules of the API."""
    try:
        found = Spec.model_validate(_merged(spec.model_dump(mode="json", by_alias=True, exclude_none=True), change))
    except ValidationError:
        return None
    return None if any(violations(found)) else found


def _merged(fields: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            merged[name] = _merged(merged.get(name) or {}, value)
        else:
            merged[name] = value
    return merged
