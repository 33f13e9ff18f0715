"""Structured outputs → a grammar as llguidance serialises it."""

from __future__ import annotations

import json

from stoker_engine.contract.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs


def compile_grammar(structured: StructuredOutputs) -> str:
    """The grammar that an output must be a sentence of.

    Raises:
        RequestError: it cannot be compiled.
    """
    from llguidance import LLMatcher

    if structured.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"})
    if structured.json is not None:
        schema = structured.json if isinstance(structured.json, str) else json.dumps(structured.json)
        return LLMatcher.grammar_from_json_schema(schema)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in structured.choice))
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    raise RequestError("structural_tag is not built yet", "structured_outputs")
