"""What an answer must look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, model_validator

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.schema.field_types import StrictModel, or_else
from stoker_engine.server.schema.unsupported import Renamed

#: Most strings of a choice.
MAX_CHOICE: Final = 10_000

#: The constraints that a `response_format` becomes, by the names in errors.
_OF_RESPONSE_FORMAT: Final = ("json", "json_object", "structural_tag")

_SchemaOrText = Annotated[
    str | dict[str, Any] | bool, or_else("must be a JSON Schema: an object, a boolean, or the text of one")
]


class JSONSchemaFormat(StrictModel):
    """A schema and what it is called. An answer is valid by the schema whether it is strict or not."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool, or_else("must be a JSON Schema: an object or a boolean")] = Field(
        alias="schema"
    )
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _says_enough(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError('type "json_schema" and the field json_schema belong together', "response_format")
        stated = [name for name in ("structures", "triggers", "format") if getattr(self, name) is not None]
        if stated and self.type != "structural_tag":
            raise RequestError(f'{stated[0]} belongs to type "structural_tag"', "response_format")
        if self.type == "structural_tag" and stated not in (["structures", "triggers"], ["format"]):
            raise RequestError("a structural tag has either structures and triggers, or a format", "response_format")
        return self

    @property
    def constraint(self) -> dict[str, Any]:
        """By the names of `StructuredOutputs`."""
        match self.type:
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                assert self.json_schema is not None
                return {"json": self.json_schema.json_schema}
            case "structural_tag":
                return {"structural_tag": self.model_dump(exclude_none=True)}
        return {}


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


class Formatted(BaseModel):
    """The fields of a body that say what its answers look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None

    # vLLM's old names.
    guided_json: Annotated[Any, Renamed('structured_outputs: {"json": …}')] = None
    guided_regex: Annotated[Any, Renamed('structured_outputs: {"regex": …}')] = None
    guided_choice: Annotated[Any, Renamed('structured_outputs: {"choice": …}')] = None
    guided_grammar: Annotated[Any, Renamed('structured_outputs: {"grammar": …}')] = None
    guided_whitespace_pattern: Annotated[Any, Renamed('structured_outputs: {"whitespace_pattern": …}')] = None
    guided_decoding_backend: Annotated[Any, Renamed("nothing: there is one library for all grammars")] = None

    @model_validator(mode="after")
    def _has_one_format(self) -> Formatted:
        _ = self.requested_format
        return self

    @property
    def requested_format(self) -> StructuredOutputs | None:
        """What an answer must look like, if it is said.

        Raises:
            RequestError: it is said twice, or not wholly.
        """
        of_format = {} if self.response_format is None else self.response_format.constraint
        fields = {} if self.structured_outputs is None else self.structured_outputs.stated
        if not of_format and self.structured_outputs is None:
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

    @property
    def format_names(self) -> Mapping[str, str]:
        """What this body calls the fields of `StructuredOutputs`, for errors."""
        if self.response_format is None or not self.response_format.constraint:
            return {}
        return {f"structured_outputs.{name}": "response_format" for name in _OF_RESPONSE_FORMAT}


def is_option(name: str) -> bool:
    """Whether a field of `StructuredOutputsFields` is no constraint, but changes one."""
    return name.startswith("disable_") or name == "whitespace_pattern"
