"""How much a grammar may take: of whoever compiles it, and of each step of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stoker_common.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

#: Most characters of a constraint as it is sent, and most bytes of what it becomes.
MAX_LENGTH: Final = 2**20

#: Most nested objects and arrays of a JSON Schema; vLLM's.
MAX_NESTING: Final = 64

#: Seconds of processor time, and bytes of memory, that compiling one may take.
COMPILE_CPU_S: Final = 2
COMPILE_MEMORY: Final = 512 * 1024**2

#: Seconds after which it is given up all the same, where the machine is busy.
COMPILE_TIMEOUT_S: Final = 20.0

#: Seconds in which one is compiled that nobody minds to wait for. What takes longer begins again, among its like.
QUICK_S: Final = 0.5

#: Most that wait to be compiled, and most of those that were not quick.
MAX_WAITING: Final = 64
MAX_SLOW: Final = 8

#: Steps that are tried of a grammar before it is taken.
TRIED_STEPS: Final = 24


def check_length(text: str, param: str) -> None:
    """Refuses text that is too long, or no Unicode.

    Raises:
        RequestError: it is; `param` names the field that it came in.
    """
    if len(text) > MAX_LENGTH:
        raise RequestError(f"this has {len(text)} characters; at most {MAX_LENGTH} are taken", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("this holds a lone surrogate, which no output can have", param) from None


def parser_limits() -> LLParserLimits:
    """llguidance's limits, which bound a step: the slowest mask seen took 8 ms of processor time.

    What is beyond them is an error of that grammar. Errors leave out the state of the parser, which is the output.
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
