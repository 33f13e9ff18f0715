"""What an answer must look like: vLLM's `structured_outputs`, alone or beside an API's own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.fields.field_types import StrictModel, or_else

#: Most strings of a choice.
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
        """What it says, by the names of `StructuredOutputs`; a false `json_object` says nothing."""
        return {
            info.alias or name: value
            for name, info in type(self).model_fields.items()
            if (value := getattr(self, name)) is not None and not (name == "json_object" and value is False)
        }


def answer_format(of_format: Mapping[str, Any], structured: StructuredOutputsFields | None) -> StructuredOutputs | None:
    """What an answer must look like, if it is said.

    Args:
        of_format: what an API's own format asks for, by the names of `StructuredOutputs`.

    Raises:
        RequestError: it is said twice, or not wholly.
    """
    fields = {} if structured is None else structured.stated
    if not of_format and structured is None:
        return None
    if of_format and (constraint_name := next((name for name in fields if not is_option(name)), None)):
        raise RequestError(
            f"response_format and structured_outputs.{constraint_name} both say what to write; send one of them",
            "structured_outputs",
        )
    if fields and not of_format and all(map(is_option, fields)):
        raise RequestError(
            f"structured_outputs.{next(iter(fields))} only says how JSON is written, and none is asked for; "
            'add structured_outputs.json, or a response_format of type "json_schema" or "json_object"',
            "structured_outputs",
        )
    return StructuredOutputs(**of_format, **fields)


def format_names(name: str) -> dict[str, str]:
    """What the constraints of an API's own format, the field `name`, are called in errors."""
    return {f"structured_outputs.{constraint}": name for constraint in ("json", "json_object", "structural_tag")}


def is_option(name: str) -> bool:
    """Whether a field of `StructuredOutputsFields` is no constraint, but changes one."""
    return name.startswith("disable_") or name == "whitespace_pattern"
