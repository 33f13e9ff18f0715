"""A rule about several fields at once, said twice: in CEL for the API server, in Python for everybody else.

The schema says what one field may hold. A rule says what fields may hold together. It is declared on the model
whose fields it looks at, so that `schema` can write it next to those fields in the CRD, where the API
server judges it, and `violations` can judge it here, for `stoker up`, `stoker plan` and the operator itself. The two
halves stand side by side and a test lets the API server and Python judge the same manifests.
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
        item = {"rule": self.cel}
        if self.explain_cel:
            item["messageExpression"] = self.explain_cel
        # A static message is wanted even so: it is what is said should the expression fail.
        item["message"] = Violation(self.field, self.message, self.remedy).sentence
        if self.field:
            item["fieldPath"] = f".{self.field}"
        return item


def violations(model: BaseModel, path: str = "") -> Iterator[Violation]:
    """Every rule that `model`, or a model inside it, breaks."""
    for rule in getattr(type(model), "RULES", ()):
        if not rule.holds(model):
            yield rule.violation(model, path)
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = join(path, field.alias or name)
        if isinstance(value, BaseModel):
            yield from violations(value, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from violations(item, f"{here}[{index}]")


def join(path: str, field: str) -> str:
    """``spec`` and ``model`` make ``spec.model``."""
    return ".".join(part for part in (path, field) if part)
