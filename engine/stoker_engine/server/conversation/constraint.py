"""The grammar that tools ask for: of calls that are a must, of strict ones, of either calls or an answer's format."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.parsers.choice import Parsers
from stoker_engine.server.parsers.parser import ToolParser
from stoker_engine.server.parsers.tool_use import ToolUse, arguments_schema

logger = logging.getLogger(__name__)


def constraint(request: ChatRequest, parsers: Parsers) -> StructuredOutputs | None:
    """The grammar, if there is any but that of the answer's format. It may take a while: there may be very many tools.

    A format is that of an answer without calls, as with OpenAI: where calls are a must, it says nothing.

    Raises:
        RequestError: there are tools, and it is not known how this model calls them, or how to keep it to a schema.
    """
    use, answer_format = request.tool_use, request.answer_format
    if parsers.forces_own_calls(use):
        forced = {"type": "structural_tag", "format": _of_parser(use, parsers, "forced_call")}
        return StructuredOutputs(structural_tag=forced, disable_any_whitespace=True)
    if use.is_forced:
        return StructuredOutputs(json=use.schema, disable_any_whitespace=True)
    if use.mode == "none":
        return None
    if parsers.tools is None:
        raise RequestError(
            "it is not known how this model writes calls of tools: the server needs --tool-call-parser; "
            'tool_choice "required", a named one and "none" work without',
            "tools",
        )
    if answer_format is None and not any(tool.strict for tool in use.tools):
        return None
    if not hasattr(parsers.tools, "structural_tag"):
        if answer_format is None:
            _warn_not_strict(parsers.tools)
            return None
        raise RequestError(
            "the answer must have a format, but what this model writes to call a tool cannot be kept to a schema while "
            'the model decides whether it does: leave the format out, or use tool_choice "required" or "none"',
            "tools",
        )
    tag = _of_parser(use, parsers, "structural_tag")
    if answer_format is None:
        return StructuredOutputs(structural_tag=tag)
    either = {"type": "or", "elements": [_calls(tag["structures"]), _format(answer_format)]}
    unsaid: dict[str, Any] = {answer_format.kind: None}
    return replace(answer_format, **unsaid, structural_tag={"type": "structural_tag", "format": either})


@functools.cache
def _warn_not_strict(parser: type[ToolParser]) -> None:
    """Agents' libraries make all tools strict: to refuse them would refuse every model whose calls are no JSON."""
    logger.warning(
        "tools that are strict are not kept to their schemas where the model decides whether it calls one: the calls "
        "that %s reads cannot be; tool_choice required and a named one keep to them",
        parser.__name__,
    )


def _of_parser(use: ToolUse, parsers: Parsers, method: str) -> dict[str, Any]:
    """What the parser of calls says of how they are kept to the schemas of their tools."""
    tools = [replace(tool, parameters=arguments_schema(tool)) for tool in use.tools]
    tag: dict[str, Any] = getattr(parsers.tools, method)(tools)
    return tag


def _calls(structures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Calls and nothing else, in the second of the two ways in which structural tags are written."""
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in structures
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}


def _format(outputs: StructuredOutputs) -> dict[str, Any]:
    """What the answer must be, in the same way."""
    match outputs.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _schema(outputs.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": outputs.regex}
        case "grammar":
            return {"type": "grammar", "grammar": outputs.grammar}
        case "choice":
            return {"type": "choice", "choices": list(outputs.choice or ())}
    raise RequestError("a structural tag does not go with tools: leave one of them out", "structured_outputs")


def _schema(schema: Any) -> Any:
    """A schema, which may be given as text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {str(error)[:200]}", "structured_outputs.json") from None
