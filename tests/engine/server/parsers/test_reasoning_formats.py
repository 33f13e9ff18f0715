"""Reasoning is separated from the answer, in the formats of the models' own chat templates."""

from __future__ import annotations

import random
import re

import pytest

from stoker_engine.server.parsers.choice import Parsers, Parsing
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, merged
from stoker_engine.server.parsers.registry import REASONING_PARSERS, reasoning_parser
from stoker_engine.server.parsers.tool_use import ToolUse

from ....support.work import assert_linear
from .reading import Reading, text_of
from .rendered import USER, Case, answer, as_recorded, end_of, needs_templates, prompt, recordings

TEMPLATES = [
    ("Qwen-Qwen3-0.6B", "qwen3"),
    ("Qwen3.5-4B", "qwen3"),
    ("StepFun3.5-Flash", "deepseek_r1"),
    ("GLM-4.6", "glm45"),
    ("GLM-4.7-Flash", "glm45"),
    ("openai-gpt-oss-120b", "openai_gptoss"),
]

#: A parser, and template switches that leave the reasoning open, or close it.
PROMPTS: dict[str, tuple[str, dict[bool, list[dict[str, bool]]]]] = {
    "Qwen-Qwen3-0.6B": ("qwen3", {True: [{}, {"enable_thinking": True}], False: [{"enable_thinking": False}]}),
    "Qwen3.5-4B": ("qwen3", {True: [{}], False: [{"enable_thinking": False}]}),
    "GLM-4.6": ("glm45", {True: [{}], False: [{"enable_thinking": False}]}),
    "GLM-4.7-Flash": ("glm45", {True: [{}], False: [{"enable_thinking": False}]}),
    "Kimi-K2-Thinking": ("kimi_k2", {True: [{}]}),
    "llama-cpp-deepseek-r1": ("deepseek_r1", {True: [{}]}),
    "HuggingFaceTB-SmolLM3-3B": ("deepseek_r1", {False: [{"enable_thinking": False}]}),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_r1", {True: [{"thinking": True}], False: [{"thinking": False}]}),
    "openai-gpt-oss-120b": ("openai_gptoss", {True: [{}]}),
}
USERS = [USER, "What does </think> mean?", "<think></think>", "<|start|>assistant"]
GRANITE_ASKS = (
    "<|start_of_role|>system<|end_of_role|>You are helpful. Write thoughts after 'Here is my thought process:' and "
    "your response after 'Here is my response:' for each user query.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Well?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
)
THINK = ["deepseek_r1", "qwen3", "glm45", "kimi_k2"]
PIECES = [
    "Hm",
    " so",
    "\n",
    "\n\n",
    "<",
    "<th",
    "</",
    "</thin",
    "<|",
    "think>",
    "é",
    "漢",
    "😀",
    "{}",
    "<tool_cal",
    "Here is",
]


def drawn_text(draw: random.Random) -> str:
    text = "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 30)))
    return "T" + text.replace("</think>", "") + "."


def drawn(template: str, seed: str) -> list[Case]:
    draw = random.Random(f"{seed} {template}")
    return [answer(template, content=drawn_text(draw), reasoning=drawn_text(draw)) for _ in range(5)]


def prompts(template: str) -> list[Case]:
    """Return prompts that leave the reasoning open, and prompts that close it."""
    cases = []
    for is_open, switches in PROMPTS[template][1].items():
        for variables in switches:
            for user in USERS if is_open else [USER]:
                text = end_of(prompt(template, user=user, **variables), user)
                cases.append({"user": user, "variables": variables, "is_open": is_open, "prompt": text})
    return cases


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Case]]:
    return recordings("reasoning", lambda: {template: drawn(template, "recorded") for template, _ in TEMPLATES})


@pytest.fixture(scope="module")
def recorded_prompts() -> dict[str, list[Case]]:
    return recordings("prompts", lambda: {template: prompts(template) for template in PROMPTS})


def check(parser: str, case: Case) -> None:
    parts = Reading(case["prompt"], parser).however_cut(case["text"])
    assert [type(part) for part in parts] == [Reasoning, Content]
    assert (text_of(parts, Reasoning).strip(), text_of(parts, Content).strip()) == (case["reasoning"], case["content"])


@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_rendered_reasoning_is_parsed_however_it_is_split(
    template: str, parser: str, recorded: dict[str, list[Case]]
) -> None:
    for case in recorded[template]:
        check(parser, case)


@needs_templates
@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_templates_render_the_recordings_and_further_answers_are_parsed(
    template: str, parser: str, recorded: dict[str, list[Case]]
) -> None:
    assert as_recorded(drawn(template, "recorded")) == recorded[template]
    for seed in range(5):
        for case in drawn(template, f"further {seed}"):
            check(parser, case)


@pytest.mark.parametrize("template", PROMPTS)
def test_output_is_all_content_if_the_prompt_closes_the_reasoning(
    template: str, recorded_prompts: dict[str, list[Case]]
) -> None:
    for case in recorded_prompts[template]:
        if not case["is_open"]:
            reading = Reading(case["prompt"], PROMPTS[template][0])
            assert not reading.parser().is_reasoning
            for text in ("Yes.", "\n\nYes </think> <think> no", "<think>"):
                assert reading.however_cut(text) == [Content(text)]


@pytest.mark.parametrize("template", PROMPTS)
def test_tags_in_user_messages_neither_open_nor_close_reasoning(
    template: str, recorded_prompts: dict[str, list[Case]]
) -> None:
    for case in recorded_prompts[template]:
        assert Reading(case["prompt"], PROMPTS[template][0]).parser().is_reasoning == case["is_open"]


@needs_templates
@pytest.mark.parametrize("template", PROMPTS)
def test_templates_render_the_recorded_prompts(template: str, recorded_prompts: dict[str, list[Case]]) -> None:
    assert as_recorded(prompts(template)) == recorded_prompts[template]
    for case in recorded_prompts[template]:
        whole = prompt(template, user=case["user"], **case["variables"])
        assert Reading(whole, PROMPTS[template][0]).parser().is_reasoning == case["is_open"]


@pytest.mark.parametrize("parser", THINK)
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("I think</think>Yes.", "I think", "Yes."),
        ("<think>I think</think>Yes.", "I think", "Yes."),
        (" \n<think>\nI think\n</think>\n\nYes.", "\nI think\n", "\n\nYes."),
        ("</think>Yes.", "", "Yes."),
        ("<think></think>", "", ""),
        ("\n</think>Yes.", "\n", "Yes."),
        ("I think", "I think", ""),
        ("I think</thin", "I think</thin", ""),
        ("<thin", "<thin", ""),
        ("\n <thi", "\n <thi", ""),
        (" \n", " \n", ""),
        ("", "", ""),
        ("A <think> in between</think>Yes.", "A <think> in between", "Yes."),
        ("<think><think>twice</think>Yes.", "<think>twice", "Yes."),
        ("I think</think>Yes</think> and <think>no</think>.", "I think", "Yes</think> and <think>no</think>."),
        ("<</think></think>", "<", "</think>"),
        ("<tool_call><|tool_calls_section_begin|></think>Yes.", "<tool_call><|tool_calls_section_begin|>", "Yes."),
    ],
)
def test_reasoning_tags_are_parsed_in_unusual_positions(parser: str, text: str, reasoning: str, content: str) -> None:
    parts = Reading("<|im_start|>assistant\n", parser).however_cut(text)
    assert parts == [part for part in (Reasoning(reasoning), Content(content)) if part.text]


@pytest.mark.parametrize(
    ("parser", "call"),
    [("qwen3", "<tool_call>\n{"), ("glm45", "<tool_call>f"), ("kimi_k2", "<|tool_calls_section_begin|>")],
)
def test_a_call_ends_the_reasoning_if_calls_are_permitted(parser: str, call: str) -> None:
    for pieces in ([f"Hm. {call} …"], f"Hm. {call} …"):
        reading = reasoning_parser(parser)("", calls=True)
        parts = [part for piece in pieces for part in reading.feed(piece)]
        assert not reading.is_reasoning
        parts += reading.end()
        assert (text_of(parts, Reasoning), text_of(parts, Content)) == ("Hm. ", f"{call} …")


@pytest.mark.parametrize("parser", REASONING_PARSERS)
def test_the_answer_begins_where_grammars_begin(parser: str) -> None:
    instructions = GRANITE_ASKS if parser == "granite" else ""
    opening = {"granite": "Here is my thought process:", "openai_gptoss": "<|channel|>analysis<|message|>"}
    for marker in reasoning_parser(parser).answer_begins_after:
        reading = reasoning_parser(parser)(instructions)
        assert reading.is_reasoning
        reading.feed(opening.get(parser, "") + "Hm.")
        assert reading.is_reasoning
        if parser == "openai_gptoss":
            reading.feed("<|end|><|start|>assistant")
        reading.feed(marker)
        assert not reading.is_reasoning
        assert reading.feed("{") == [Content("{")]


@pytest.mark.parametrize("parser", [*THINK, "openai_gptoss"])
def test_text_is_not_held_back(parser: str) -> None:
    reading = Reading("", parser).parser()
    opening = "<|channel|>analysis<|message|>" if parser == "openai_gptoss" else "x"
    reading.feed(opening)
    for character in "I think <b> and </p> </thank> you, <|not|> ":
        text = text_of(reading.feed(character), Reasoning)
        assert character in text or character in "<|/phinkat"


@pytest.mark.parametrize("parser", ["qwen3", "granite", "openai_gptoss"])
@pytest.mark.parametrize("repeated", ["<", "</think", " ", "Here is my ", "<|start|>", "<|channel|>"])
def test_parsing_takes_linear_work(parser: str, repeated: str) -> None:
    def read(size: int) -> None:
        text = (repeated * size)[:size]
        assert len(text_of(Reading("", parser)(text), Reasoning, Content)) == len(text)

    assert_linear(read, 1_000)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Here is my thought process: a: b Here is my response: c", " a: b ", " c"),
        ("\nHere's my thought process:\nHm\n\nHere's my response:\nYes", "\nHm\n\n", "\nYes"),
        ("Here is my thought process: Hm", " Hm", ""),
        ("Here is my thought process: Hm Here is my resp", " Hm Here is my resp", ""),
        ("Here is my thought", "", "Here is my thought"),
        ("Here is my response: Yes", "", "Here is my response: Yes"),
        ("Well. Here is my thought process: x Here is my response: y", "", None),
        ("", "", ""),
        ("  ", "", "  "),
    ],
)
def test_granites_reasoning_starts_with_its_sentence(text: str, reasoning: str, content: str | None) -> None:
    parts = Reading("", "granite").however_cut(text)
    content = text if content is None else content
    assert parts == [part for part in (Reasoning(reasoning), Content(content)) if part.text]


def test_only_system_instructions_make_granite_reason() -> None:
    instructions = GRANITE_ASKS
    quoted = instructions.replace(
        "You are helpful. Write", "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>You wrote"
    )
    assert Reading(instructions, "granite").parser().is_reasoning
    for text in (quoted, "Here is my response:", "<|start_of_role|>user<|end_of_role|>Here is my response: no"):
        assert not Reading(text, "granite").parser().is_reasoning
    # Earlier turns contain the sentences too.
    earlier = "<|start_of_role|>assistant<|end_of_role|>Here is my response: hm<|end_of_text|>\n"
    assert (
        not Reading(f"<|start_of_role|>system<|end_of_role|>Hi.<|end_of_text|>\n{earlier}", "granite")
        .parser()
        .is_reasoning
    )


@pytest.mark.parametrize(
    ("parser", "started", "text", "expected"),
    [
        *((parser, "The sky", " is</think> blue", [Content(" is</think> blue")]) for parser in THINK),
        *((parser, "<think>a</think>The", " sky", [Content(" sky")]) for parser in THINK),
        *((parser, "<think>a", " b</think>c", [Reasoning(" b"), Content("c")]) for parser in THINK),
        *((parser, "<think>a</s><|im_start|>Hm", "b", [Content("b")]) for parser in THINK),
        ("granite", "Here is", " my thought process: x", [Content(" my thought process: x")]),
        ("granite", "Here is my thought process: a", "b Here is my response: c", [Reasoning("b "), Content(" c")]),
        ("granite", "Here is my thought process: a Here is my response: c", "d", [Content("d")]),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>The", " sky", [Content(" sky")]),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>a", "b", [Reasoning("b")]),
    ],
)
def test_a_continued_message_stays_reasoning_or_content(
    parser: str, started: str, text: str, expected: list[Part]
) -> None:
    before = GRANITE_ASKS if parser == "granite" else ""
    for pieces in ([text], list(text)):
        reading = reasoning_parser(parser)(before + started, continued=True)
        assert reading.is_reasoning == isinstance(expected[0], Reasoning)
        parts = [part for piece in pieces for part in reading.feed(piece)]
        assert merged([*parts, *reading.end()]) == expected


@pytest.mark.parametrize(
    "header, is_answer",
    [
        ("<|channel|>final<|message|>", True),
        ("<|channel|>final json<|message|>", True),
        ("<|channel|>final <|constrain|>json<|message|>", True),
        ("<|channel|>final<|constrain|>json<|message|>", True),
        ("<|channel|>final code<|message|>", True),
        ("<|channel|>analysis<|message|>", False),
        ("<|channel|>finally<|message|>", False),
        ("<|channel|>final to=functions.f<|message|>", False),
        ("<|channel|>commentary to=functions.final <|constrain|>json<|message|>", False),
        ("<|channel|>analysis<|message|>final <|end|>", False),
    ],
)
def test_grammars_begin_after_headers_of_the_final_channel(header: str, *, is_answer: bool) -> None:
    parsing = Parsing(Parsers(reasoning=reasoning_parser("openai_gptoss")), "", ToolUse(), frozenset())
    assert parsing.answer_pattern is not None
    found = re.search(parsing.answer_pattern, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}{{")
    assert (found is not None) == is_answer
    if found is not None:
        assert found.string[found.end() :] == "{"
