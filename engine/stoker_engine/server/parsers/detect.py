"""Detection of a model's parsers from its chat template. A parser is chosen only if its detection is certain.

A template shows the format of calls, because it renders the calls of earlier turns. The reasoning tags with which
prompts may end show whether the model reasons by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

#: Names of parsers, and patterns that must all match the template; the first such parser is used.
_CALLS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", (r"<\|start\|>assistant", r"<\|channel\|>final<\|message\|>", r"functions\.")),
    ("kimi_k2", (r"<\|tool_calls_section_begin\|>", r"<\|tool_call_argument_begin\|>", r"<\|tool_call_end\|>")),
    ("deepseek_v3", (r"<｜tool▁calls▁begin｜>", r"<｜tool▁sep｜>", r"```json")),
    ("deepseek_v31", (r"<｜tool▁calls▁begin｜>", r"<｜tool▁sep｜>")),
    ("glm45", (r"<tool_call>", r"<arg_key>.*</arg_key>", r"<arg_value>.*</arg_value>")),
    ("qwen3_coder", (r"<tool_call>\\n<function=", r"<parameter=", r"</parameter>", r"</function>\\n</tool_call>")),
    ("mistral", (r"\[TOOL_CALLS\]", r"\[AVAILABLE_TOOLS\]")),
    ("granite4", (r"<\|start_of_role\|>", r"<tool_call>\\n\{\"name\": \"", r"\"arguments\": ", r"\}\\n</tool_call>")),
    ("granite", (r"<\|start_of_role\|>", r"<\|tool_call\|>")),
    ("hermes", (r"<tool_call>(?:\\n)?\{\"name\": \"", r"\"arguments\": ", r"\}(?:\\n)?</tool_call>")),
    ("hermes", (r"\n<tool_call>\n", r"\"name\": \"", r"\"arguments\": ", r"\n</tool_call>'")),
    ("llama3_json", (r"<\|start_header_id\|>ipython", r"\{\"name\": \"' ?\+", r"\"parameters\": ", r"<\|eot_id\|>")),
)

_OPEN, _CLOSE = "<think>", "</think>"

#: Statements, expressions and comments of a template.
_STATEMENT: Final = re.compile(r"\{#.*?#\}|\{%-?\s*(\w+)(.*?)-?%\}|\{\{(.*?)\}\}", re.DOTALL)
_GENERATION: Final = re.compile(r"\{%-?\s*if\s+[^%]*\badd_generation_prompt\b[^%]*%\}")
_INLINE: Final = re.compile(r"(?P<yes>.*)\sif\s.*?\selse\s(?P<no>.*)", re.DOTALL)


def tool_call_parser(template: str | None) -> str | None:
    """Return the name of the tool call parser for this chat template; None if the detection is not certain."""
    for name, patterns in _CALLS:
        if all(re.search(pattern, template or "") for pattern in patterns):
            return name
    return None


def reasoning_parser(template: str | None) -> str | None:
    """Return the name of the reasoning parser for this chat template; None if the detection is not certain."""
    calls = tool_call_parser(template)
    if template is None or calls == "openai":
        return None if template is None else "openai_gptoss"
    if calls == "kimi_k2":  # prompts do not show it, but templates of reasoning models put tags into earlier answers
        return "kimi_k2" if "<think></think>" in template else None
    ends = _ends_of_prompts(template)
    if ends not in ({_OPEN}, {_CLOSE, _OPEN}, {_CLOSE, ""}):
        return None
    if calls == "glm45":
        return "glm45"
    return "qwen3" if "<tool_call>" in template else "deepseek_r1"


def _ends_of_prompts(template: str) -> set[str]:
    """Return the tags that may come last when the template starts the model's turn; an empty text means none."""
    begins = [found.end() for found in _GENERATION.finditer(template)]
    if not begins:
        return {""}
    return _ends(_STATEMENT.finditer(template, begins[-1]), {""})[0]


def _ends(statements: Iterator[re.Match[str]], ends: set[str]) -> tuple[set[str], str]:
    """Return the possible last tags after a block, and the keyword that ends it; `ends` are those before the block."""
    for statement in statements:
        keyword = statement[1]
        if keyword in ("elif", "else", "endif"):
            return ends, keyword
        if keyword == "if":
            before, ends = ends, set()
            while keyword not in ("else", "endif"):
                branch, keyword = _ends(statements, before)
                ends |= branch
            if keyword == "else":
                ends |= _ends(statements, before)[0]
            elif keyword == "endif":
                ends |= before
        elif statement[3] is not None or keyword == "set":
            ends = _written(statement[3] or statement[2], ends)
    return ends, "endif"


def _written(expression: str, ends: set[str]) -> set[str]:
    """Return the possible last tags after an expression; `ends` are those before it."""
    if (inline := _INLINE.fullmatch(expression)) is not None:
        return _written(inline["yes"], ends) | _written(inline["no"], ends)
    tags = re.findall(f"{_OPEN}|{_CLOSE}", expression)
    return {tags[-1]} if tags else ends
