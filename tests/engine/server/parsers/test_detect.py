"""Parsers are chosen by chat templates only where that is sure: what is chosen reads what the template writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.contract.errors import RequestError
from stoker_engine.server.parsers.detect import reasoning_parser, tool_call_parser
from stoker_engine.server.parsers.parts import Content
from stoker_engine.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from stoker_engine.tokens import chat_template

from .rendered import STOPS, TEMPLATES, Reading, said
from .test_xml_calls import calls_of

CHOSEN: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Bielik-11B-v3.0-Instruct": ("hermes", None),  # reasons only if asked, and its prompt does not tell
    "ByteDance-Seed-OSS": (None, None),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm45", "glm45"),
    "HuggingFaceTB-SmolLM3-3B": (None, "deepseek_r1"),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_r1"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", None),
    "ibm-granite-granite-4.0": ("granite4", None),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": (None, None),
    "unsloth-Apriel-1.5": (None, None),
}

#: A folder of further templates, such as llama.cpp's models/templates.
FURTHER = sorted(Path(os.environ.get("STOKER_CHAT_TEMPLATES", "/nowhere")).glob("*.jinja"))
ALL = [*sorted(TEMPLATES.glob("*.jinja")), *FURTHER]

#: They write no calls, or none beside content that is empty.
WITHOUT_CALLS = ("ibm-granite-granite-3.3-2B-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
CALLS = [("get_weather", {"city": "Zürich", "days": 3})]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How long."},
            },
            "required": ["city"],
        },
    },
}


def test_what_is_chosen() -> None:
    texts = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
    assert {name: (tool_call_parser(text), reasoning_parser(text)) for name, text in texts.items()} == CHOSEN
    assert {name for name, _ in CHOSEN.values() if name} <= set(TOOL_PARSERS)
    assert {name for _, name in CHOSEN.values() if name} <= set(REASONING_PARSERS)


@pytest.mark.parametrize(
    "template", [None, "", "{{ messages }}", "{% if add_generation_prompt %}{{ '<think>'", "{% if"]
)
def test_other_texts_choose_none(template: str | None) -> None:
    assert tool_call_parser(template) is None
    assert reasoning_parser(template) in (None, "deepseek_r1")


def rendered(text: str, *messages: dict[str, Any], ask: bool = True, **variables: Any) -> str:
    return chat_template.render(
        text,
        [{"role": "user", "content": "Well?"}, *messages],
        tools=[],
        add_generation_prompt=ask,
        variables={"bos_token": "<s>", "eos_token": "</s>", **variables},
    )


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_parser_that_is_chosen_reads_the_calls_that_the_template_writes(path: Path) -> None:
    text = path.read_text()
    if (chosen := tool_call_parser(text)) is None or path.stem in WITHOUT_CALLS:
        return
    ids = ["functions.get_weather:0" if chosen == "kimi_k2" else "call00000"]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(ids, CALLS, strict=True)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        chat = rendered(text, answer, ask=False)
    except RequestError as error:
        if "sandbox" in str(error) or "unsafe" in str(error) or "concatenate str" in str(error):
            pytest.skip(f"the template cannot be rendered: {error}")
        raise
    prompt = rendered(text)
    begin = next((i for i, (a, b) in enumerate(zip(chat, prompt, strict=False)) if a != b), len(prompt))
    if begin < len(prompt):  # the prompt opens the reasoning, which the chat leaves out
        begin = max(chat.rfind(">", 0, begin), chat.rfind("\n", 0, begin)) + 1
    generated = chat[begin:]
    last = list(STOPS.finditer(generated))
    generated = generated[: last[-1].start()] if last else generated
    reading = Reading("<think></think>", reasoning_parser(text), chosen, [TOOL])
    if chosen == "openai":
        reading = Reading("<|start|>assistant", "openai_gptoss", chosen, [TOOL])
    assert calls_of(reading([generated])) == CALLS, generated


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_reasoning_is_told_from_the_answer_by_the_prompts_of_the_template(path: Path) -> None:
    text = path.read_text()
    chosen = reasoning_parser(text)
    if chosen in (None, "openai_gptoss", "kimi_k2"):
        return
    prompts = {}
    for wanted in (None, True, False):
        variables = {} if wanted is None else {"enable_thinking": wanted, "thinking": wanted}
        prompts[wanted] = rendered(text, **variables).rstrip()
    for prompt in prompts.values():
        is_reasoning = Reading(prompt, chosen).parser().is_reasoning
        assert is_reasoning != prompt.endswith("</think>")
        # Where the prompt neither opens nor closes it, the template must be one that can close it.
        assert prompt.endswith(("<think>", "</think>")) or prompts[False].endswith("</think>")
    assert said(Reading(prompts[False], chosen)(["Yes."]), Content) == "Yes." or prompts[False].endswith("<think>")
