"""What a plan refuses, and the ways out that it names: a way that can be planned is planned first, since one that would
be refused is worse than none."""

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
    """A way out.

    Attributes:
        text: the words for it.
        also: the words where another one of its kind was named just before ("use float32" or "float16").
        change: the fields of the spec that it sets, as in a manifest, None where it removes one. None: it concerns
            what is not in the spec, such as another model, and cannot be planned; or it is planned already.
        config: the config.json of the model that it names; None: the same.
    """

    text: str
    change: Mapping[str, Any] | None = None
    also: str = ""
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Refusal:
    """A `Violation` whose remedy is still to be found.

    Attributes:
        field, message, reason: as of `Violation`.
        proposals: makes the ways out, in the order in which they are named.
        otherwise: what is said where none of them would be accepted.
        joined: what stands between them.
    """

    field: str
    message: str
    reason: str
    proposals: Callable[[], Iterable[Proposal]]
    otherwise: str
    joined: str = ", or "

    def violation(self, is_possible: Callable[[Refusal, Proposal], bool] | None) -> Violation:
        """The violation, with the proposals that are possible; None: without any, for a plan that is only a trial."""
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
    """The spec with a change; None where the rules of the API refuse it."""
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
