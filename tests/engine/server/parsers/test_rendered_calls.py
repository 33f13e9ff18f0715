"""Calls written by the models' own chat templates are parsed correctly.

``recordings/json_calls.json`` contains the templates' output for random calls; see `rendered`.
"""

from __future__ import annotations

import random
import re

import pytest

from stoker_engine.server.parsers.parts import tool_call
from stoker_engine.tokens import chat_template

from .drawn_calls import Call, draw_calls, parse
from .rendered import Case, as_recorded, needs_templates, recordings, template_text

TEMPLATES = {
    "deepseek_v3": ["deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "llama-cpp-deepseek-r1"],
    "deepseek_v31": ["deepseek-ai-DeepSeek-V3.1"],
    "granite4": ["ibm-granite-granite-4.0", "ibm-granite-granite-4.1"],
    "hermes": [
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
    ],
    "kimi_k2": ["moonshotai-Kimi-K2"],
    "llama3_json": [
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
    ],
    "mistral": [
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-mistral-Devstral-Small-2507",
    ],
}
CASES = [(parser, template) for parser, templates in TEMPLATES.items() for template in templates]
SINGLE = ("llama3_json",)  # its templates refuse several calls at once
WITHOUT_CONTENT = ("llama-cpp-deepseek-r1",)  # writes either content or calls

STOPS = re.compile(r"<\|im_end\|>|</s>|<\|eot_id\|>|<｜end▁of▁sentence｜>|<\|end_of_text\|>")
REASONING = re.compile(r"\A<think>\s*</think>\s*")


def render(parser: str, template: str, content: str, calls: list[Call]) -> Case:
    """Return what the model would generate, according to its template."""
    source = template_text(template)
    user = {"role": "user", "content": "Well?"}
    ids = [f"functions.{name}:{i}" if parser == "kimi_k2" else f"call{i:05}" for i, (name, _) in enumerate(calls)]
    answer = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    chat = chat_template.render(source, [user, answer], tools=[], add_generation_prompt=False, variables=variables)
    prompt = chat_template.render(source, [user], tools=[], variables=variables)
    begin = next((i for i, (a, b) in enumerate(zip(chat, prompt, strict=False)) if a != b), len(prompt))
    if begin < len(prompt):  # the prompt opens the reasoning, which the chat omits
        begin = max(chat.rfind(">", 0, begin), chat.rfind("\n", 0, begin)) + 1
    text = REASONING.sub("", STOPS.split(chat[begin:])[0])
    return {
        "content": content if text.startswith(content) else "",
        "calls": calls,
        "ids": [id if id in text else None for id in ids],
        "text": text,
    }


def drawn(parser: str, template: str, seed: str) -> list[Case]:
    draw = random.Random(f"{seed} {template}")
    cases = []
    for content in ("", "", "I look it up:", "Zwei\n\nAbsätze {so}."):
        calls = draw_calls(draw)
        content = "" if template in WITHOUT_CONTENT else content
        cases.append(render(parser, template, content, calls[:1] if parser in SINGLE else calls))
    return cases


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Case]]:
    return recordings(
        "json_calls", lambda: {template: drawn(parser, template, "recorded") for parser, template in CASES}
    )


def check(parser: str, case: Case) -> None:
    text = case["text"]
    whole = parse(parser, [text])
    assert whole.calls == [tuple(call) for call in case["calls"]]
    assert whole.content.strip() == case["content"]
    assert whole.contents[0] == whole.content
    for expected, id in zip(case["ids"], whole.ids, strict=True):
        assert expected is None or id == expected
    assert parse(parser, text).parts == whole.parts
    for at in range(len(text) % 7, len(text), len(text) // 100 + 1):
        assert parse(parser, [text[:at], text[at:]]).parts == whole.parts


@pytest.mark.parametrize(("parser", "template"), CASES)
def test_rendered_calls_are_parsed_however_the_text_is_split(
    parser: str, template: str, recorded: dict[str, list[Case]]
) -> None:
    for case in recorded[template]:
        check(parser, case)


@needs_templates
@pytest.mark.parametrize(("parser", "template"), CASES)
def test_templates_render_the_recordings_and_further_calls_are_parsed(
    parser: str, template: str, recorded: dict[str, list[Case]]
) -> None:
    assert as_recorded(drawn(parser, template, "recorded")) == recorded[template]
    for seed in range(5):
        for case in as_recorded(drawn(parser, template, f"further {seed}")):
            check(parser, case)


def test_arguments_are_the_models_own_text() -> None:
    written = '{"b" : 1.50,  "a": "\\u00e9\\/", "n": 1E2}'
    for parser, text in {
        "hermes": f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written} }}',
        "granite": f'<|tool_call|>[{{"name": "f", "arguments":{written}}}]',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
        "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
        "kimi_k2": f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{written}<|tool_call_end|>",
    }.items():
        assert parse(parser, [text]).parts[:2] == tool_call("f", written), parser
