"""Regular expressions → the grammar that llguidance makes masks of, wherever they come from."""

from __future__ import annotations

import json
from typing import Any

from stoker_common.errors import RequestError
from stoker_engine.grammar.limits import check_length
from stoker_engine.grammar.regex_dialect import in_dialect


def regex_grammar(pattern: str, param: str) -> dict[str, Any]:
    """The one grammar of llguidance's list that a regular expression becomes.

    Raises:
        RequestError: it is too long, or means something else to others.
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
