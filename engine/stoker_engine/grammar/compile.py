"""Structured outputs → the text of a grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.check import why_invalid
from stoker_engine.grammar.choice import lark_of_choice
from stoker_engine.grammar.json_schema import prepare_schema
from stoker_engine.grammar.lark import lark_of
from stoker_engine.grammar.limits import MAX_LENGTH, check_length
from stoker_engine.grammar.regex import regex_grammar
from stoker_engine.grammar.structural_tag import StructuralTags

#: Default whitespace in JSON, as in common indentation. It is bounded, because a model may otherwise generate
#: whitespace without end.
WHITESPACE: Final = r"[ \t]{1,8}|\r?\n[ \t]{0,64}"

#: Matches regular expressions that match only JSON whitespace. Within brackets, where quantifiers would be literals, it
#: accepts only whitespace.
_ONLY_WHITESPACE: Final = re.compile(
    r"(?:[ \t\n\r]|\\[ntrs]|\[(?:[ \t\n\r]|\\[ntrs])+\]|\(\?:|[()|*+?]|\{[0-9]+,?[0-9]*\})*"
)


def compile_grammar(outputs: StructuredOutputs, special: Mapping[str, int] | None = None) -> str:
    """Return a grammar in llguidance's format, as JSON: ``{"grammars": […]}``. `check_grammar` then checks it.

    Args:
        special: the model's special tokens (spelling → id), which structural tags may contain.

    Raises:
        RequestError: the constraint is malformed or unsupported; `param` names the field of `StructuredOutputs`.
    """
    param = f"structured_outputs.{outputs.kind}"
    grammars = _grammars(outputs, param, special or {})
    source = json.dumps({"grammars": grammars})
    if len(source) > MAX_LENGTH:
        raise RequestError(f"the grammar has {len(source)} characters; at most {MAX_LENGTH} are allowed", param)
    return source


def _grammars(outputs: StructuredOutputs, param: str, special: Mapping[str, int]) -> list[dict[str, Any]]:
    closed = outputs.disable_additional_properties
    match outputs.kind:
        case "json" | "json_object":
            schema = {"type": "object"} if outputs.kind == "json_object" else outputs.json
            prepared = prepare_schema(schema, param, closed)
            if prepared is False:
                raise RequestError("the schema is false, so no output is valid", param)
            return [
                {"json_schema": {"x-guidance": _json_options(outputs), **(prepared if prepared is not True else {})}}
            ]
        case "regex":
            return [regex_grammar(outputs.regex or "", param)]
        case "choice":
            return [{"lark_grammar": lark_of_choice(outputs.choice or (), param)}]
        case "grammar":
            check_length(outputs.grammar or "", param)
            return [{"lark_grammar": lark_of(outputs.grammar or "", param)}]
        case _:
            tags = StructuralTags(param, _json_options(outputs), closed, special)
            return tags.grammars(outputs.structural_tag)


def _json_options(outputs: StructuredOutputs) -> dict[str, Any]:
    if outputs.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = outputs.whitespace_pattern
    if pattern is None:
        return {"whitespace_pattern": WHITESPACE}
    param = "structured_outputs.whitespace_pattern"
    if not _ONLY_WHITESPACE.fullmatch(pattern):
        raise RequestError(
            r"whitespace_pattern must match only spaces, \t, \n and \r, such as '[ \n]{0,4}'",
            param,
        )
    if reason := why_invalid(json.dumps({"grammars": [regex_grammar(pattern, param)]})):
        raise RequestError(f"whitespace_pattern: {reason}", param)
    return {"whitespace_pattern": pattern.replace(r"\s", r"[ \t\n\r]")}
