"""A choice of strings → a grammar in Lark's syntax."""

from __future__ import annotations

import json
from collections.abc import Iterable

from stoker_engine.grammar.limits import check_length


def lark_of_choice(choices: Iterable[str], param: str) -> str:
    """Return a grammar of one terminal, because thousands of rules exceed the parser's limits. The spelling of a
    special token matches text, not the token.

    Raises:
        RequestError: a string is too long, or not valid Unicode.
    """
    choices = list(dict.fromkeys(choices))
    for choice in choices:
        check_length(choice, param)
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"start: CHOICE\nCHOICE: {' | '.join(literals)}"
