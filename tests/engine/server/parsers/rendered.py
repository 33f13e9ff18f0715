"""Model output according to the models' own chat templates: recorded, and rendered again if the templates are
available.

The templates belong to their authors and are not in this repository: ``recordings`` contains their output. If
``STOKER_CHAT_TEMPLATES`` names a folder of them (llama.cpp has them in models/templates), tests render again, compare,
and draw further cases; ``STOKER_GOLDEN=write`` records again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.tokens import chat_template

#: A folder of chat templates.
FOLDER = os.environ.get("STOKER_CHAT_TEMPLATES")
RECORDINGS = Path(__file__).parent / "recordings"

needs_templates = pytest.mark.skipif(FOLDER is None, reason="STOKER_CHAT_TEMPLATES names no folder of chat templates")

#: Ends of a turn; these tokens are not in a sequence's text.
STOPS = re.compile(
    r"<\|(?:im_end|observation|user|return|call|role_end|end_of_text|eot_id)\|>|<｜end▁of▁sentence｜>|</s>"
)
USER = "Well?"

Case = dict[str, Any]


def recordings(name: str, make: Callable[[], Mapping[str, Sequence[Case]]]) -> dict[str, list[Case]]:
    """Return cases by template from a file of recordings; `make` renders them for recording."""
    path = RECORDINGS / f"{name}.json"
    if FOLDER is not None and os.environ.get("STOKER_GOLDEN") == "write":
        path.write_text("{\n" + ",\n".join(map(_lines, *zip(*make().items(), strict=True))) + "\n}\n")
    cases: dict[str, list[Case]] = json.loads(path.read_text())
    return cases


def as_recorded(cases: Sequence[Case]) -> list[Case]:
    """Return cases as a file of recordings contains them."""
    again: list[Case] = json.loads(json.dumps(cases))
    return again


def _lines(template: str, cases: Sequence[Case]) -> str:
    lines = (json.dumps(case, ensure_ascii=False) for case in cases)
    return f"{json.dumps(template)}: [\n" + ",\n".join(lines) + "\n]"


def template_text(name: str) -> str:
    """Return a chat template of the folder."""
    return (Path(FOLDER or ".") / f"{name}.jinja").read_text()


def prompt(name: str, tools: Sequence[Mapping[str, Any]] | None = None, user: str = USER, **variables: Any) -> str:
    """Return the prompt of a new chat."""
    return chat_template.render(
        template_text(name), [{"role": "user", "content": user}], tools=tools, variables={"bos_token": "", **variables}
    )


def end_of(prompt: str, user: str = USER) -> str:
    """Return the part of a prompt after the user's message; the part before is the template's own."""
    return prompt[prompt.index(user) :]


def answer(
    name: str,
    content: str = "",
    reasoning: str | None = None,
    calls: Iterable[tuple[str, Mapping[str, Any]]] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Case:
    """Return an answer: the end of the prompt, the text that the model would generate, and its expected parts."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    written = [
        {"id": f"functions.{function}:{i}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(calls)
    ]
    if written:
        message["tool_calls"] = written
    before = prompt(name, tools)
    chat = chat_template.render(
        template_text(name),
        [{"role": "user", "content": USER}, message],
        tools=tools,
        add_generation_prompt=False,
        variables={"bos_token": ""},
    )
    assert chat.startswith(before), (before[-60:], chat[len(before) - 60 :])
    ends = list(STOPS.finditer(chat, len(before)))
    text = chat[len(before) : ends[-1].start() if ends else None].removesuffix("\n" if ends else "")
    expected_parts = {"content": content, "reasoning": reasoning, "calls": list(calls)}
    return {**expected_parts, "prompt": end_of(before), "text": text}
