"""Regular expressions → grammars for llguidance."""

from __future__ import annotations

import json
from typing import Any

from stoker_common.errors import RequestError
from stoker_engine.grammar.limits import check_length
from stoker_engine.grammar.regex_dialect import in_dialect


def regex_grammar(pattern: str, param: str) -> dict[str, Any]:
    """Return the entry of llguidance's list of grammars for a regular expression.

    Raises:
        RequestError: the expression is too long, not valid Unicode, or rejected by `in_dialect`.
    """
    from llguidance import LLMatcher

    check_length(pattern, param)
    try:
        pattern = in_dialect(pattern)
    except ValueError as error:
        raise RequestError(f"regex: {error}", param) from None
    [grammar] = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    assert isinstance(grammar, dict)
    return grammar
