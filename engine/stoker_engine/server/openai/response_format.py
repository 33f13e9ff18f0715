"""Fields for an answer's format: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.fields.field_types import StrictModel, or_else
from stoker_engine.server.fields.structured_outputs import StructuredOutputsFields, answer_format, format_names
from stoker_engine.server.fields.unsupported import Renamed


class JSONSchemaFormat(StrictModel):
    """A JSON Schema with a name, which is enforced with or without `strict`."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool, or_else("must be a JSON Schema: an object or a boolean")] = Field(
        alias="schema"
    )
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _says_enough(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError('type "json_schema" and the field json_schema require each other', "response_format")
        stated = [name for name in ("structures", "triggers", "format") if getattr(self, name) is not None]
        if stated and self.type != "structural_tag":
            raise RequestError(f'{stated[0]} is allowed only with type "structural_tag"', "response_format")
        if self.type == "structural_tag" and stated not in (["structures", "triggers"], ["format"]):
            raise RequestError("a structural tag requires structures and triggers, or a format", "response_format")
        return self

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint as arguments of `StructuredOutputs`; empty for the type "text"."""
        match self.type:
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                assert self.json_schema is not None
                return {"json": self.json_schema.json_schema}
            case "structural_tag":
                return {"structural_tag": self.model_dump(exclude_none=True)}
        return {}


class Formatted(BaseModel):
    """The fields of a body that determine the format of its answers."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None

    # vLLM's obsolete fields.
    guided_json: Annotated[Any, Renamed('structured_outputs: {"json": …}')] = None
    guided_regex: Annotated[Any, Renamed('structured_outputs: {"regex": …}')] = None
    guided_choice: Annotated[Any, Renamed('structured_outputs: {"choice": …}')] = None
    guided_grammar: Annotated[Any, Renamed('structured_outputs: {"grammar": …}')] = None
    guided_whitespace_pattern: Annotated[Any, Renamed('structured_outputs: {"whitespace_pattern": …}')] = None
    guided_decoding_backend: Annotated[Any, Renamed("nothing instead: all grammars use the same library")] = None

    @model_validator(mode="after")
    def _has_one_format(self) -> Formatted:
        _ = self.requested_format
        return self

    @property
    def requested_format(self) -> StructuredOutputs | None:
        """Constraints on the answer's format, or None.

        Raises:
            RequestError: the format is constrained twice, or an option is set without a constraint.
        """
        return answer_format(self._of_response_format, self.structured_outputs)

    @property
    def format_names(self) -> Mapping[str, str]:
        """Field names in errors about `StructuredOutputs` → this body's names; empty if they are equal."""
        return format_names("response_format") if self._of_response_format else {}

    @property
    def _of_response_format(self) -> dict[str, Any]:
        return {} if self.response_format is None else self.response_format.constraint
