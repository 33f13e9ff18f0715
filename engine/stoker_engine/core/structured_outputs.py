"""Constraints on an output, with vLLM's names (its ``StructuredOutputsParams``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import RequestError

#: The kinds of constraints; exactly one must be given.
CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_PARAM: Final = "structured_outputs"

#: Options for the form of JSON, allowed only with constraints in `_WITH_JSON`.
_JSON_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_WITH_JSON: Final = ("json", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint on an output, and options for the form of its JSON.

    Attributes:
        json: JSON Schema of the output: an object, a boolean, or either as text.
        regex: regular expression that matches the whole output.
        choice: allowed outputs.
        grammar: context-free grammar of the output, in Lark's or GBNF (EBNF) syntax.
        json_object: True: the output is a JSON object.
        structural_tag: description, in vLLM's format, of constrained text between tags: an object, or its text.
        disable_any_whitespace: JSON has no whitespace outside strings.
        disable_additional_properties: objects with named properties have no others by default.
        whitespace_pattern: regular expression for the whitespace of JSON.
        begins_after: regular expression (Python's). The constraint applies after its first match in the output, so that
            reasoning before it is unconstrained. Special tokens match by their spelling. None: it applies from the
            start.

    Raises:
        RequestError: not exactly one constraint is given, a value is invalid, or an option does not apply to the
            constraint; `param` names it.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    begins_after: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:  # False requests no constraint
            object.__setattr__(self, "json_object", None)
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) != 1:
            stated = f"{' and '.join(constraints)} are given" if constraints else "none is"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(CONSTRAINTS)}; {stated}", _PARAM)
        self._check_types()
        for option in _JSON_OPTIONS:
            if self.kind not in _WITH_JSON and getattr(self, option):
                raise RequestError(
                    f"{option} applies to JSON only, and {self.kind} is not JSON; remove it", f"{_PARAM}.{option}"
                )

    @property
    def kind(self) -> str:
        """The name of the constraint, one of `CONSTRAINTS`."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    def _check_types(self) -> None:
        def check(name: str, types: tuple[type, ...], expected: str) -> None:
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                raise RequestError(f"{name} must be {expected}, got {type(value).__name__}", f"{_PARAM}.{name}")

        check("json", (str, bool, Mapping), "a JSON Schema: an object, a boolean, or their text")
        for name in ("regex", "grammar", "whitespace_pattern", "begins_after"):
            check(name, (str,), "a string")
        if self.begins_after is not None:
            try:
                re.compile(self.begins_after.encode())
            except (re.error, ValueError) as error:
                raise RequestError(
                    f"begins_after is not a regular expression: {error}", f"{_PARAM}.begins_after"
                ) from None
        check("json_object", (bool,), "true or left out")
        check("structural_tag", (str, Mapping), "an object or its text")
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(choice, str) for choice in self.choice):
                raise RequestError("choice must be a list of strings", f"{_PARAM}.choice")
            if not self.choice:
                raise RequestError("choice is empty: no output is possible", f"{_PARAM}.choice")
            object.__setattr__(self, "choice", tuple(self.choice))


#: vLLM's name.
StructuredOutputsParams = StructuredOutputs
