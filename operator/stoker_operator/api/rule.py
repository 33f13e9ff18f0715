"""Rules besides those of the schema, each written twice: in CEL for the API server, and in Python.

Most rules constrain several fields together. A rule is declared on the pydantic class with these fields, and the CRD
has it beside them, where the API server evaluates it. `violations` evaluates it in the operator and in commands such as
`stoker plan`. A test has the API server and Python evaluate the same manifests.

A `Rule` constrains an object. A `ChangeRule` constrains an object relative to its previous version, so only the API
server and the webhook, which know both versions, can evaluate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from stoker_operator.api.violation import Violation


@dataclass(frozen=True)
class Rule:
    """A rule about an object.

    Attributes:
        field: field of the violation, relative to the rule's object (``parallelism``); empty for the object itself.
        holds: the rule in Python.
        cel: the rule in CEL; ``self`` is the object.
        message: what is wrong.
        remedy: what to write instead.
        explain: returns message and remedy for an object; None if they do not depend on it.
        explain_cel: `explain` in CEL; it must yield "message; remedy".
    """

    field: str
    holds: Callable[[Any], bool]
    cel: str
    message: str = ""
    remedy: str = ""
    explain: Callable[[Any], tuple[str, str]] | None = None
    explain_cel: str = ""

    def violation(self, subject: Any, path: str) -> Violation:
        """Return the violation of the rule by `subject` at `path`."""
        message, remedy = self.explain(subject) if self.explain else (self.message, self.remedy)
        return Violation(join(path, self.field), message, remedy)

    def validation(self) -> dict[str, str]:
        """Return the rule as an item of ``x-kubernetes-validations``."""
        # The API server uses the static message if the expression fails.
        expression = {"messageExpression": self.explain_cel} if self.explain_cel else {}
        return _validation(self.cel, self.field, self.message, self.remedy) | expression


@dataclass(frozen=True)
class ChangeRule:
    """A rule about a change of an object.

    Attributes:
        field: as in `Rule`.
        holds: the rule in Python; its arguments are the new object and the previous one.
        cel: the rule in CEL; ``self`` is the new object and ``oldSelf`` the previous one.
        message: what is wrong.
        remedy: what to write instead.
    """

    field: str
    holds: Callable[[Any, Any], bool]
    cel: str
    message: str
    remedy: str

    def violation(self, path: str) -> Violation:
        """Return the violation of the rule by a change at `path`."""
        return Violation(join(path, self.field), self.message, self.remedy, reason="Immutable")

    def validation(self) -> dict[str, str]:
        """Return the rule as an item of ``x-kubernetes-validations``."""
        return _validation(self.cel, self.field, self.message, self.remedy)


def _validation(cel: str, field: str, message: str, remedy: str) -> dict[str, str]:
    item = {"rule": cel, "message": Violation(field, message, remedy).sentence}
    return item | ({"fieldPath": f".{field}"} if field else {})


def violations(model: BaseModel, path: str = "") -> Iterator[Violation]:
    """Yield the violations of `RULES` by `model` and the models inside it."""
    for rule in getattr(type(model), "RULES", ()):
        if not rule.holds(model):
            yield rule.violation(model, path)
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        field_path = join(path, field.alias or name)
        if isinstance(value, BaseModel):
            yield from violations(value, field_path)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from violations(item, f"{field_path}[{index}]")


def changes(model: BaseModel, before: BaseModel, path: str = "") -> Iterator[Violation]:
    """Yield the violations of `CHANGES` by the change from `before` to `model`, also in nested models outside lists."""
    for rule in getattr(type(model), "CHANGES", ()):
        if not rule.holds(model, before):
            yield rule.violation(path)
    for name, field in type(model).model_fields.items():
        value, was = getattr(model, name), getattr(before, name)
        if isinstance(value, BaseModel) and isinstance(was, BaseModel):
            yield from changes(value, was, join(path, field.alias or name))


def join(path: str, field: str) -> str:
    """Join two paths with a dot; either may be empty."""
    return ".".join(part for part in (path, field) if part)
