"""Parsers are chosen from chat templates only if the choice is certain: they parse what the template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import RequestError
from stoker_engine.contract import names
from stoker_engine.server.parsers.detect import reasoning_parser, tool_call_parser
from stoker_engine.server.parsers.parts import Content
from stoker_engine.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from stoker_engine.tokens import chat_template

from .reading import Reading, calls_of, text_of
from .rendered import FOLDER, STOPS, needs_templates
from .small_templates import CALLS, HARMONY, MARKS, NO_REASONING, REASONING, template

ENDS = REASONING | NO_REASONING

#: Parsers chosen for models' own templates.
CHOSEN: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Bielik-11B-v3.0-Instruct": ("hermes", None),  # reasons only on request, which its prompt does not show
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

#: Minimal templates of this project, and those of the folder.
SMALL = {
    "harmony": HARMONY,
    **{f"{calls}; {end}": template(CALLS[calls], ENDS[end]) for calls in CALLS for end in ENDS},
}
REAL = {path.stem: path.read_text() for path in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
ALL = SMALL | REAL

#: Templates that write no calls, or calls only with empty content.
WITHOUT_CALLS = ("ibm-granite-granite-3.3-2B-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
CALLED = [("get_weather", {"city": "Zürich", "days": 3})]
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


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("calls", ["", *CALLS])
def test_small_templates_choose_their_parsers(calls: str, end: str) -> None:
    text = template(CALLS.get(calls, ""), ENDS[end])
    parser = calls.partition(",")[0]
    assert tool_call_parser(text) == (parser or None)
    expected = None
    if parser == "kimi_k2":  # decided by the tags of answers, which only some prompts end with
        expected = "kimi_k2" if "<think></think>" in ENDS[end] else None
    elif end in REASONING:
        expected = {"glm45": "glm45", "": "deepseek_r1"}.get(parser) or (
            "qwen3" if "<tool_call>" in CALLS[calls] else "deepseek_r1"
        )
    assert reasoning_parser(text) == expected


def test_small_templates_cover_all_detectable_parsers() -> None:
    undetectable = {"llama4_pythonic", "pythonic", "qwen3_xml"}  # qwen3_xml's calls are qwen3_coder's
    assert {tool_call_parser(text) for text in SMALL.values()} == set(TOOL_PARSERS) - undetectable
    assert {reasoning_parser(text) for text in SMALL.values()} == {None, *REASONING_PARSERS} - {"granite"}


@pytest.mark.parametrize(("calls", "mark"), [(calls, mark) for calls, marks in MARKS.items() for mark in marks])
def test_near_misses_choose_no_parser(calls: str, mark: str) -> None:
    assert mark in CALLS[calls]
    assert tool_call_parser(template(CALLS[calls].replace(mark, "-"))) is None


def test_near_misses_may_choose_another_format() -> None:
    assert tool_call_parser(template(CALLS["granite4"].replace("<|start_of_role|>", ""))) == "hermes"
    assert tool_call_parser(template(CALLS["deepseek_v3"].replace("```json", ""))) == "deepseek_v31"
    for mark in ("<|start|>assistant", "<|channel|>final<|message|>", "functions."):
        assert tool_call_parser(HARMONY.replace(mark, "-")) is None
        assert reasoning_parser(HARMONY.replace(mark, "-")) is None


def test_reasoning_is_detected_by_the_prompts_end_and_not_by_answers() -> None:
    answers = "{{ '<think>' + (message.reasoning_content or '') + '</think>' }}"
    assert reasoning_parser(template(answers)) is None
    assert reasoning_parser(template(answers, REASONING["open"])) == "deepseek_r1"
    assert reasoning_parser(template(prompt="{# <think> #}{{ '[bot]' }}")) is None
    assert reasoning_parser(template(prompt=REASONING["open"]).replace("add_generation_prompt", "tools")) is None


@needs_templates
def test_real_templates_choose_their_parsers() -> None:
    assert {name: (tool_call_parser(REAL[name]), reasoning_parser(REAL[name])) for name in CHOSEN} == CHOSEN


def test_flags_accept_exactly_the_existing_parsers() -> None:
    assert set(names.TOOL_CALL_PARSERS) == set(TOOL_PARSERS)
    assert set(names.REASONING_PARSERS) == set(REASONING_PARSERS)


@pytest.mark.parametrize(
    "template", [None, "", "{{ messages }}", "{% if add_generation_prompt %}{{ '<think>'", "{% if"]
)
def test_other_texts_choose_no_tool_call_parser(template: str | None) -> None:
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


@pytest.mark.parametrize("name", ALL)
def test_the_chosen_parser_reads_the_templates_calls(name: str) -> None:
    text = ALL[name]
    if (chosen := tool_call_parser(text)) is None or name in WITHOUT_CALLS:
        return
    ids = ["functions.get_weather:0" if chosen == "kimi_k2" else "call00000"]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(ids, CALLED, strict=True)
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
    if begin < len(prompt):  # the prompt opens the reasoning, which the chat omits
        begin = max(chat.rfind(">", 0, begin), chat.rfind("\n", 0, begin)) + 1
    generated = chat[begin:]
    last = list(STOPS.finditer(generated))
    generated = generated[: last[-1].start()] if last else generated
    reading = Reading("<think></think>", reasoning_parser(text), chosen, [TOOL])
    if chosen == "openai":
        reading = Reading("<|start|>assistant", "openai_gptoss", chosen, [TOOL])
    assert calls_of(reading([generated])) == CALLED, generated


@pytest.mark.parametrize("name", ALL)
def test_the_prompt_decides_whether_the_output_starts_with_reasoning(name: str) -> None:
    text = ALL[name]
    chosen = reasoning_parser(text)
    if chosen in (None, "openai_gptoss", "kimi_k2"):
        return
    prompts = {}
    for thinking in (None, True, False):
        variables = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        prompts[thinking] = rendered(text, **variables).rstrip()
    for prompt in prompts.values():
        is_reasoning = Reading(prompt, chosen).parser().is_reasoning
        assert is_reasoning != prompt.endswith("</think>")
        # If the prompt neither opens nor closes it, the template must have a mode that closes it.
        assert prompt.endswith(("<think>", "</think>")) or prompts[False].endswith("</think>")
    assert text_of(Reading(prompts[False], chosen)(["Yes."]), Content) == "Yes." or prompts[False].endswith("<think>")
