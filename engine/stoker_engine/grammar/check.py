"""Checks a grammar before the engine receives it: computes masks with the engine's own code, under its limits."""

from __future__ import annotations

import random
import re
from typing import Final

from stoker_common.errors import RequestError
from stoker_engine.core.grammar import Grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.limits import TRIED_STEPS, parser_limits
from stoker_engine.grammar.matcher import GrammarError

#: Matches a byte of a mask that has the bit of an allowed token.
_ANY: Final = re.compile(rb"[^\0]")

#: Characters to which an error is truncated.
_LONGEST: Final = 300


def check_grammar(grammars: Grammars, source: str, param: str) -> None:
    """Compile a grammar, and run the first steps of a random valid output.

    Some limits are only reached in these steps. For example, an object with thousands of optional properties compiles,
    but exceeds a limit at its first steps.

    Raises:
        RequestError: the grammar is malformed, too large, or unsatisfiable.
    """
    try:
        matcher = grammars.begin(Grammar(source)).matcher
    except GrammarError as error:
        raise RequestError(why_invalid(source) or str(error), param) from None
    rng = random.Random(0)
    for step in range(TRIED_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            if step == 0 and "NoExtension" in matcher.get_error():
                raise RequestError("no output satisfies this: a part of it is contradictory, or never ends", param)
            raise RequestError(_sentence(matcher.get_error()), param)
        if matcher.is_stopped():
            return
        byte_indices = [match.start() for match in _ANY.finditer(mask)]
        if not byte_indices:
            raise RequestError("no output satisfies this: a part of it is contradictory", param)
        byte_index = rng.choice(byte_indices)
        token_id = 8 * byte_index + rng.choice([bit for bit in range(8) if mask[byte_index] >> bit & 1])
        if not matcher.consume_token(token_id):
            raise RequestError(_sentence(matcher.get_error()), param)


def why_invalid(source: str) -> str:
    """Return llguidance's error for a grammar, checked without a vocabulary; empty if it is valid."""
    from llguidance import LLMatcher

    failed, reasons = LLMatcher.validate_grammar_with_warnings(source, limits=parser_limits())
    return _sentence(reasons[0]) if failed else ""


def _sentence(error: str) -> str:
    """Return one sentence for an error of llguidance."""
    if "panic" in error:
        return "the grammar compiler crashed on this; rewrite the grammar"
    if "Current row has" in error or "lexer error: too many" in error or "fuel" in error:
        return "the grammar is too large: at some position it allows too many alternatives; simplify it"
    if reason := re.search(r"^error: (.*)$", error, re.MULTILINE):
        return f"the regular expression cannot be compiled: {reason[1]}"[:_LONGEST]
    return error.partition("\n")[0].partition(" <state>")[0][:_LONGEST]
