"""Users' grammars: llguidance's variant of Lark's syntax, and GBNF (EBNF), which is converted to it.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from stoker_common.errors import RequestError
from stoker_engine.grammar.json_schema import prepare_schema
from stoker_engine.grammar.regex_dialect import in_dialect

#: Supported options of a grammar: those that only affect which text matches.
_OPTIONS: Final = frozenset({"allow_initial_skip", "ignore_once", "no_forcing"})

#: ``name[options]:``, at the beginning of a line
_RULE_OPTIONS: Final = re.compile(r"^\s*[?!]*[\w-]+\s*(?:\{[^}\n]*\}|::[^\[\n]*)?\[([^\n]*)\]\s*:", re.MULTILINE)
#: Parts of a line that may contain a slash: strings, comments, and regular expressions with flags.
_PIECE: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|\#.*|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)')

_UNKEPT: Final = re.compile(r"\b(max_tokens|temperature|stop)\s*=")


def lark_of(grammar: str, param: str) -> str:
    """Return a user's grammar in Lark's syntax, with its JSON Schemas prepared.

    Raises:
        RequestError: the grammar, or a JSON Schema in it, is invalid or uses unsupported options.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(grammar)
    except RecursionError:
        raise RequestError("the grammar is nested too deeply", param) from None
    except Exception as error:  # the library may raise anything for invalid GBNF
        raise RequestError(f"the grammar is neither valid Lark nor valid GBNF: {error}"[:500], param) from None
    for options in _RULE_OPTIONS.findall(lark):
        if unkept := _UNKEPT.search(options):
            raise RequestError(f"the rule option {unkept[1]} is not supported; remove it", param)
    lark = _PIECE.sub(lambda piece: _in_dialect(piece, param), lark)
    lark = _each_json(lark, "%llguidance", lambda options: _check_options(options, param))
    return _each_json(lark, "%json", lambda schema: prepare_schema(schema, param))


def _in_dialect(piece: re.Match[str], param: str) -> str:
    if piece["regex"] is None or "u" in piece["flags"]:
        return piece[0]
    try:
        return f"/{in_dialect(piece['regex'])}/{piece['flags']}"
    except ValueError as error:
        raise RequestError(f"the grammar's expression /{piece['regex'][:100]}/: {error}", param) from None


def _each_json(lark: str, directive: str, change: Callable[[Any], Any]) -> str:
    """Apply `change` to the JSON after each `directive`. Anything else than a JSON object or boolean stays
    unchanged, and llguidance rejects it."""
    decoder, parts, end = json.JSONDecoder(), [], 0
    for match in re.finditer(rf"{directive}\s*", lark):
        if match.start() < end:
            continue  # inside the previous JSON
        try:
            value, after = decoder.raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict | bool):
            parts += [lark[end : match.end()], json.dumps(change(value))]
            end = after
    return "".join((*parts, lark[end:]))


def _check_options(options: Any, param: str) -> Any:
    unknown = next((name for name in options if name not in _OPTIONS), None) if isinstance(options, dict) else None
    if unknown is not None:
        raise RequestError(f"%llguidance: the option {unknown[:100]} is not supported; remove it", param)
    return options
