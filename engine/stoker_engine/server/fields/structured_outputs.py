"""Constraints on an answer's format: vLLM's `structured_outputs`, alone or with the API's own format field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.fields.field_types import StrictModel, or_else

#: Maximum number of strings of `choice`.
MAX_CHOICE: Final = 10_000

_SchemaOrText = Annotated[
    str | dict[str, Any] | bool, or_else("must be a JSON Schema: an object, a boolean, or the text of one")
]


class StructuredOutputsFields(StrictModel):
    """vLLM's ``StructuredOutputsParams``."""

    json_schema: _SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICE, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str | dict[str, Any], or_else("must be an object, or the text of one")] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """The fields that are set, keyed by their names in `StructuredOutputs`; a false `json_object` counts as
        unset."""
        return {
            info.alias or name: value
            for name, info in type(self).model_fields.items()
            if (value := getattr(self, name)) is not None and not (name == "json_object" and value is False)
        }


def answer_format(of_format: Mapping[str, Any], structured: StructuredOutputsFields | None) -> StructuredOutputs | None:
    """Return the constraints on an answer's format, or None if the request has none.

    Args:
        of_format: constraints of the API's own format field, by the names of `StructuredOutputs`.

    Raises:
        RequestError: not exactly one constraint is set, or an option does not apply to it.
    """
    fields = {} if structured is None else structured.stated
    if not of_format and structured is None:
        return None
    if of_format and (constraint_name := next((name for name in fields if not is_option(name)), None)):
        raise RequestError(
            f"response_format and structured_outputs.{constraint_name} both set the format; send only one of them",
            "structured_outputs",
        )
    if fields and not of_format and all(map(is_option, fields)):
        raise RequestError(
            f"structured_outputs.{next(iter(fields))} is an option of JSON output, which the request does not ask for; "
            "add structured_outputs.json or structured_outputs.json_object",
            "structured_outputs",
        )
    return StructuredOutputs(**of_format, **fields)


def format_names(name: str) -> dict[str, str]:
    """Return the names in errors for the constraints that come from an API's own format field `name`."""
    return {f"structured_outputs.{constraint}": name for constraint in ("json", "json_object", "structural_tag")}


def is_option(name: str) -> bool:
    """Return whether a field of `StructuredOutputsFields` only modifies a constraint."""
    return name.startswith("disable_") or name == "whitespace_pattern"
