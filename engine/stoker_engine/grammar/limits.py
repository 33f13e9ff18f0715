"""Limits of a grammar, for its compilation and for each step of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stoker_common.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

#: Maximum length of a constraint in a request, and of the resulting grammar, in characters.
MAX_LENGTH: Final = 2**20

#: Maximum nesting depth of objects and arrays in a JSON Schema; vLLM's limit.
MAX_NESTING: Final = 64

#: Limits of a compilation: seconds of CPU time, and bytes of memory.
COMPILE_CPU_S: Final = 2
COMPILE_MEMORY: Final = 512 * 1024**2

#: Wall-clock seconds after which a compilation is stopped, even if it has used less CPU time than `COMPILE_CPU_S`.
COMPILE_TIMEOUT_S: Final = 20.0

#: Seconds after which a compilation in the quick lane is restarted in the slow lane, so that others do not wait.
QUICK_S: Final = 0.5

#: Maximum number of grammars that wait or are compiled in the quick lane, and in the slow lane.
MAX_WAITING: Final = 64
MAX_SLOW: Final = 8

#: Maximum number of steps for which a grammar is tested before it is accepted.
TRIED_STEPS: Final = 24


def check_length(text: str, param: str) -> None:
    """Reject text that is too long, or not valid Unicode.

    Raises:
        RequestError: the text is invalid; `param` names its field.
    """
    if len(text) > MAX_LENGTH:
        raise RequestError(f"this has {len(text)} characters; at most {MAX_LENGTH} are allowed", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("this contains a lone surrogate, which is invalid Unicode", param) from None


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits of a grammar's size and of a step: the slowest measured mask took 8 ms of CPU time.

    A grammar that exceeds them fails. Its errors omit the parser's state, because that contains the output.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
