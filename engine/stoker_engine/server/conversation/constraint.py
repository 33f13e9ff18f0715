"""Grammars that tools require: for forced calls, for strict tools, and for "either calls or a formatted answer"."""

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
    """Return the constraint that the tools require, or None. May take long for very many tools.

    As with OpenAI, a format applies to answers without calls, so it has no effect if calls are forced.

    Raises:
        RequestError: the model's tool call format is unknown, or the answer's format is invalid or cannot be combined
            with it.
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
            "the tool call format of this model is unknown: start the server with --tool-call-parser, "
            'or use tool_choice "required", a named function or "none"',
            "tools",
        )
    if answer_format is None and not any(tool.strict for tool in use.tools):
        return None
    if not hasattr(parsers.tools, "structural_tag"):
        if answer_format is None:
            _warn_not_strict(parsers.tools)
            return None
        raise RequestError(
            "this model's tool calls cannot be constrained to a schema, so tools that the model may but need not call "
            'exclude a format: omit the format, or use tool_choice "required" or "none"',
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
    """Warn once instead of refusing: agent libraries mark all tools strict, even if the model's calls are not JSON."""
    logger.warning(
        "strict tools are not enforced while the model decides whether to call one, because the calls that "
        "%s parses cannot be constrained; use tool_choice required or a named function",
        parser.__name__,
    )


def _of_parser(use: ToolUse, parsers: Parsers, method: str) -> dict[str, Any]:
    """Return the structural tag that the tool parser's `method` builds for the tools."""
    tools = [replace(tool, parameters=arguments_schema(tool)) for tool in use.tools]
    tag: dict[str, Any] = getattr(parsers.tools, method)(tools)
    return tag


def _calls(structures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a tag for calls and nothing else, in the newer format of structural tags."""
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
    """Return the answer's format, in the newer format of structural tags."""
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
    raise RequestError("a structural tag cannot be combined with tools; omit one of them", "structured_outputs")


def _schema(schema: Any) -> Any:
    """Return a schema, parsed if it is given as text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not valid JSON: {str(error)[:200]}", "structured_outputs.json") from None
