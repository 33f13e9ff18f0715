"""Tools for `stoker chat`: the model may call each public function.

    stoker serve Qwen/Qwen3-0.6B --tool-call-parser hermes
    stoker chat --tools examples/chat_tools.py

The model must have been trained to call tools. `--tool-call-parser` names the format of its calls; it may be omitted if
the chat template implies the format.
"""

import ast
import operator
from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def current_time(timezone: str = "UTC") -> str:
    """Return the current date and time in a time zone such as Europe/Oslo."""
    return datetime.now(ZoneInfo(timezone)).strftime("%A, %Y-%m-%d %H:%M")


def calculate(expression: str) -> float:
    """Return the value of an arithmetic expression such as (17 + 4) * 2, with the operators + - * and /."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"{ast.unparse(node)} is not a supported arithmetic expression")

    return value(ast.parse(expression, mode="eval").body)
