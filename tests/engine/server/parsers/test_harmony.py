"""gpt-oss's messages: those of its chat template, and malformed ones."""

from __future__ import annotations

import json
import random

import pytest

from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallStart, merged, tool_call

from ....support.work import assert_linear
from .drawn_calls import draw_call
from .reading import Reading, calls_of, text_of
from .rendered import Case, answer, as_recorded, needs_templates, prompt, recordings

GPT_OSS = "openai-gpt-oss-120b"
F = {"type": "function", "function": {"name": "f", "description": "It does.", "parameters": {"type": "object"}}}
PROMPT = "Well?<|end|><|start|>assistant"
BOTH = Reading(PROMPT, "openai_gptoss", "openai", [F])
REASONING_ALONE = Reading(PROMPT, "openai_gptoss")
CALLS_ALONE = Reading(PROMPT, None, "openai", [F])

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALLED = tool_call("f", '{"a": 1}')


def drawn(seed: str) -> list[Case]:
    draw = random.Random(seed)
    cases = [answer(GPT_OSS, "It is 5.", "I add.")]
    for _ in range(10):
        name, arguments = draw_call(draw)
        if "<|" in json.dumps(arguments):
            arguments = {"a": 1.5}
        cases.append(answer(GPT_OSS, "", "I think.\n\nSo…", [(name, arguments)], [F]))
    return cases


@pytest.fixture(scope="module")
def recorded() -> list[Case]:
    return recordings("harmony", lambda: {GPT_OSS: drawn("recorded")})[GPT_OSS]


def check(case: Case) -> None:
    assert case["prompt"] == PROMPT
    parts = Reading(case["prompt"], "openai_gptoss", "openai", [F]).however_cut(case["text"])
    assert parts.pop(0) == Reasoning(case["reasoning"])
    if case["content"]:
        assert parts.pop() == Content(case["content"])
    assert calls_of(parts) == [tuple(call) for call in case["calls"]]


def test_rendered_answers_are_parsed_however_they_are_split(recorded: list[Case]) -> None:
    for case in recorded:
        check(case)


@needs_templates
def test_the_template_renders_the_recordings_and_further_answers_are_parsed(recorded: list[Case]) -> None:
    assert as_recorded(drawn("recorded")) == recorded
    assert prompt(GPT_OSS, [F]).endswith(PROMPT)
    for case in drawn("further"):
        check(case)


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.f json<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.f<|message|>{"a": 1}',
        '<|channel|>analysis to=functions.f code<|message|> {"a": 1}\n',
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
        '<|channel|>commentary to=f <|constrain|>json<|message|>{"a": 1}',
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
def test_all_spellings_of_calls_are_parsed(call: str, end: str) -> None:
    assert BOTH.however_cut(call + end) == CALLED
    assert BOTH.however_cut(ANALYSIS + call + end) == [Reasoning("Hm."), *CALLED]
    assert CALLS_ALONE.however_cut(call + end) == CALLED
    assert REASONING_ALONE.however_cut(call + end) == [Content(call + end)]
    another = f"{ANALYSIS}{call}{end}<|start|>assistant{call}"
    assert BOTH.however_cut(another) == [Reasoning("Hm."), *CALLED, *CALLED]


def test_messages_of_one_kind_are_joined_by_line_feeds() -> None:
    text = (
        f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{ANALYSIS}"
        "<|channel|>final<|message|>It is 5.\n<|return|>"
    )
    assert BOTH.however_cut(text) == [
        Reasoning("Hm."),
        Content("I look."),
        Reasoning("\nHm."),
        Content("\nIt is 5.\n"),
    ]
    assert text_of(CALLS_ALONE(text), Content).endswith("It is 5.\n")


def test_each_parser_alone_loses_nothing() -> None:
    text = f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>"
    assert REASONING_ALONE.however_cut(text) == [
        Reasoning("Hm."),
        Content(f"I look.<|start|>assistant{CALL}<|call|>"),
    ]
    assert CALLS_ALONE.however_cut(text) == [
        Content("<|channel|>analysis<|message|>Hm.<|end|>I look."),
        *CALLED,
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello", [Content("Hello")]),
        (" today", [Content(" today")]),
        (" to=f and more", [Content(" to=f and more")]),
        ("\n\nHello", [Content("\n\nHello")]),
        ("assistant", [Content("assistant")]),
        ("<|channel|>final", [Content("<|channel|>final")]),
        ("<|channel|>final Hello\n there", [Content("<|channel|>final Hello\n there")]),
        ("<|message|>Hello", [Content("Hello")]),
        ("<|message|>Hello<|end|>", [Content("Hello")]),
        ("<|channel|>unknown<|message|>Hello<|end|>", [Content("<|channel|>unknown<|message|>Hello<|end|>")]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [Content("{}")]),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [Content("a<|message|>b<|constrain|>c")]),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [Reasoning("a"), Content("b")]),
        (
            "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
            [Reasoning("a"), Content("b")],
        ),
        ("<|channel|>analysis<|message|>a<|end|>b", [Reasoning("a"), Content("b")]),
        ("<|channel|>analysis<|message|>a", [Reasoning("a")]),
        ("<|channel|>analysis<|message|>a<|en", [Reasoning("a<|en")]),
        ("<|channel|>analysis<|message|>a<|end|><|start|>user<|message|>b<|end|>", None),
        ("<|channel|>commentary to=python<|message|>print()<|call|>", None),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", None),
        ("<|channel|>commentary to=g<|message|>{}<|call|>", None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]<|call|>", None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>5", None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", None),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": NaN}<|end|>', None),
        ("<|start|><|start|>", None),
        ("<|channel|><|channel|>", None),
        ("<|end|><|return|>", None),
        ("<|channel|>" + "x" * 2000, None),
        ("", []),
    ],
)
def test_text_that_is_not_harmony_is_unchanged_content(text: str, parts: list[Part] | None) -> None:
    if parts is None:
        analysis, end, rest = text.partition("a<|end|>")
        parts = [Reasoning("a"), Content(rest)] if end else [Content(analysis)]
    assert BOTH.however_cut(text) == parts
    assert REASONING_ALONE.however_cut(text) == parts


def test_a_truncated_call_is_unchanged_content() -> None:
    for end in range(1, len(CALL)):
        expected = Content(CALL[:end])
        for reading in (BOTH, CALLS_ALONE, REASONING_ALONE):
            if CALL[:end] not in ("<|channel|>commentary",):
                assert reading(CALL[:end]) == [expected], CALL[:end]


@pytest.mark.parametrize(
    ("opening", "is_reasoning", "part"),
    [
        ("", True, Content("x")),
        ("<|channel|>analysis<|message|>", True, Reasoning("x")),
        ("<|channel|>analysis<|message|>I thi", True, Reasoning("x")),
        ("<|channel|>final<|message|>", False, Content("x")),
        ("<|channel|>final<|message|>It", False, Content("x")),
        ("<|channel|>commentary<|message|>", False, Content("x")),
    ],
)
def test_prompts_may_end_within_a_message(opening: str, is_reasoning: bool, part: Part) -> None:
    reading = Reading(PROMPT + opening, "openai_gptoss", "openai")
    assert reading.parser().is_reasoning == is_reasoning
    assert reading.however_cut("x") == [part]


def test_reasoning_ends_where_an_answer_or_a_call_starts() -> None:
    for written, is_reasoning in (
        ("<|channel|>analysis<|message|>Hm.", True),
        ("<|channel|>analysis<|message|>Hm.<|end|>", True),
        (f"{ANALYSIS}<|channel|>final", True),
        (f"{ANALYSIS}<|channel|>final<|message|>", False),
        (f"{ANALYSIS}{CALL}", False),
        ("Hello", False),
    ):
        parser = BOTH.parser()
        parser.feed(written)
        assert parser.is_reasoning == is_reasoning, written


def test_random_markers_lose_no_text() -> None:
    draw = random.Random(3)
    pieces = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "assistant", "user"]
    pieces += [
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        " json",
        "{}",
        "word1 ",
        "word2\n",
        '{"a": 1}',
        " ",
    ]
    for _ in range(300):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 14)))
        for reading in (BOTH, CALLS_ALONE, REASONING_ALONE):
            whole = reading([text])
            assert reading(text) == whole
            cut = draw.randrange(len(text) + 1)
            assert reading([text[:cut], text[cut:]]) == whole
            if not any(isinstance(part, ToolCallStart) for part in whole):
                for word in ("word1", "word2", "{}", '{"a": 1}'):
                    written = "".join(part.text for part in whole if not isinstance(part, ToolCallStart))
                    assert written.count(word) == text.count(word), text


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("", "<|start|>assistant"),
        ("", "<|channel|>final"),
        ("<|channel|>commentary to=functions.f<|message|>", "{"),
        ("<|channel|>commentary to=functions.f<|message|>", "<|message|>"),
        ("<|channel|>final<|message|>", "<|"),
        (" to=", "x"),
    ],
)
def test_parsing_takes_linear_work(begin: str, repeated: str) -> None:
    def read(size: int) -> None:
        text = begin + (repeated * size)[:size]
        assert BOTH(text) == merged(BOTH([text]))

    assert_linear(read, 1_000)
