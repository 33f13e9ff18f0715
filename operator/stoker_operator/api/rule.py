"""A rule about several fields at once, stated twice: in CEL for the API server, in Python for all others.

The schema says what one field may hold. A rule says what fields may hold together. It is declared on the model
whose fields it looks at, so that `schema` can write it next to those fields in the CRD, where the API
server judges it, and `violations` can judge it here, for `stoker up`, `stoker plan` and the operator itself. The two
halves stand side by side and a test lets the API server and Python judge the same manifests.

A `Rule` looks at an object. A `ChangeRule` looks at an object and at what it was before, and so can only be judged
where both are known: by the API server and by the webhook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from stoker_operator.api.violation import Violation


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        field: the field to blame, relative to the model the rule is on (``parallelism``); empty for the model
            itself.
        holds: the rule in Python.
        cel: the rule in CEL; ``self`` is the model.
        message: what is wrong.
        remedy: what to write instead.
        explain: message and remedy of the object at hand, where they depend on it.
        explain_cel: the same as a CEL expression; it must yield "message; remedy".
    """

    field: str
    holds: Callable[[Any], bool]
    cel: str
    message: str = ""
    remedy: str = ""
    explain: Callable[[Any], tuple[str, str]] | None = None
    explain_cel: str = ""

    def violation(self, subject: Any, path: str) -> Violation:
        """What to say of `subject`, found at `path`, that breaks the rule."""
        message, remedy = self.explain(subject) if self.explain else (self.message, self.remedy)
        return Violation(join(path, self.field), message, remedy)

    def validation(self) -> dict[str, str]:
        """The rule as an item of ``x-kubernetes-validations``."""
        # A static message is wanted also where there is an expression: it is what is said should that fail.
        expression = {"messageExpression": self.explain_cel} if self.explain_cel else {}
        return _validation(self.cel, self.field, self.message, self.remedy) | expression


@dataclass(frozen=True)
class ChangeRule:
    """One rule about a change.

    Attributes:
        field: as of `Rule`.
        holds: the rule in Python, of the model as it is to be and as it was.
        cel: the rule in CEL; ``self`` is the model and ``oldSelf`` what it was.
        message: what is wrong.
        remedy: what to write instead.
    """

    field: str
    holds: Callable[[Any, Any], bool]
    cel: str
    message: str
    remedy: str

    def violation(self, path: str) -> Violation:
        """What to say of a change at `path` that breaks the rule."""
        return Violation(join(path, self.field), self.message, self.remedy, reason="Immutable")

    def validation(self) -> dict[str, str]:
        """The rule as an item of ``x-kubernetes-validations``."""
        return _validation(self.cel, self.field, self.message, self.remedy)


def _validation(cel: str, field: str, message: str, remedy: str) -> dict[str, str]:
    item = {"rule": cel, "message": Violation(field, message, remedy).sentence}
    return item | ({"fieldPath": f".{field}"} if field else {})


def violations(model: BaseModel, path: str = "") -> Iterator[Violation]:
    """Every rule that `model`, or a model inside it, breaks."""
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
    """Every rule about changes that the change of `before` to `model` breaks, in them or in a model inside them."""
    for rule in getattr(type(model), "CHANGES", ()):
        if not rule.holds(model, before):
            yield rule.violation(path)
    for name, field in type(model).model_fields.items():
        value, was = getattr(model, name), getattr(before, name)
        if isinstance(value, BaseModel) and isinstance(was, BaseModel):
            yield from changes(value, was, join(path, field.alias or name))


def join(path: str, field: str) -> str:
    """``spec`` and ``model`` make ``spec.model``."""
    return ".".join(part for part in (path, field) if part)
