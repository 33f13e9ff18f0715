"""Reasoning separated from the answer, whole and streamed; its number of tokens; the echo of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stoker_engine.server.conversation.reasoning_tokens import ReasoningTokens
from stoker_engine.server.parsers.parts import Content, Reasoning

from .scripted_engine import ScriptedEngine
from .test_forced_calls import FORCED
from .test_tools import MESSAGES, OSLO, TIME, WEATHER, calls_of, openai_client, serve

THOUGHT = "<think>\nLet me see.\n</think>\n\n"
TOOLS = [WEATHER, TIME]


def ask(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})


@pytest.mark.parametrize("piece", [1, 4, 1000])
@pytest.mark.parametrize(
    "text", [f"{THOUGHT}It rains.", "Let me see.</think>It rains.", "still thinking", f"{THOUGHT}{OSLO}"]
)
def test_streamed_answer_equals_the_whole_one(piece: int, text: str) -> None:
    client = openai_client(ScriptedEngine(text, text, piece=piece), reasoning_parser="qwen3")
    whole = ask(client, tools=TOOLS)
    message = whole.choices[0].message
    assert message.reasoning.strip() in ("Let me see.", "still thinking")
    assert message.reasoning_content == message.reasoning
    assert (message.content or "").strip() == ("It rains." if "rains" in text else "")
    assert calls_of(message) == ([("weather", {"city": "Oslo"})] if OSLO in text else [])
    events = list(ask(client, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.model_dump(exclude_unset=True) for event in events for choice in event.choices]
    for name in ("reasoning", "reasoning_content", "content"):
        streamed = "".join(delta.get(name) or "" for delta in deltas)
        assert streamed == (getattr(message, name) or ""), name
    assert sum("tool_calls" in delta for delta in deltas) == 2 * (OSLO in text)
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    reasoning_tokens = whole.usage.completion_tokens_details.reasoning_tokens
    assert events[-1].usage.completion_tokens_details.reasoning_tokens == reasoning_tokens
    assert reasoning_tokens == (text.index("</think>") + len("</think>") if "</think>" in text else len(text))


@pytest.mark.parametrize("piece", [1, 4])
def test_a_call_ends_the_reasoning_tokens_without_a_marker(piece: int) -> None:
    text = f"Let me see. {OSLO}"
    client = openai_client(ScriptedEngine(text, text, piece=piece), reasoning_parser="qwen3")
    whole = ask(client, tools=TOOLS)
    *_, last = ask(client, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    counts = [each.usage.completion_tokens_details.reasoning_tokens for each in (whole, last)]
    assert counts[0] == counts[1] < len(text)


def test_content_is_null_while_there_is_only_reasoning() -> None:
    client = serve(ScriptedEngine("hm", "</think>"), reasoning_parser="deepseek_r1")
    message = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "hm")
    message = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()["choices"][0]["message"]
    assert message["content"] == ""
    assert "reasoning" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_omitted(stream: bool) -> None:
    body = {"messages": MESSAGES, "include_reasoning": False, "stream": stream}
    client = serve(ScriptedEngine(f"{THOUGHT}It rains."), reasoning_parser="qwen3")
    answer = client.post("/v1/chat/completions", json=body)
    assert "rains" in answer.text or stream
    assert "see" not in answer.text
    assert "reasoning_content" not in answer.text
    for field in ({"logprobs": True}, {"return_token_ids": True}):
        refused = client.post("/v1/chat/completions", json={**body, **field})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))


@pytest.mark.parametrize("piece", [1, 9])
def test_forced_calls_come_after_the_reasoning(piece: int) -> None:
    engine = ScriptedEngine(f"hm <tool_call></think>{FORCED}", piece=piece)
    client = openai_client(engine, reasoning_parser="qwen3")
    choice = ask(client, tools=TOOLS, tool_choice="required").choices[0]
    assert choice.message.reasoning == "hm <tool_call>"
    assert [name for name, _ in calls_of(choice.message)] == ["weather", "time"]
    structured = engine.requests_seen[0][1].structured_outputs
    assert structured is not None
    assert structured.begins_after == "</think>"


def test_reasoning_tokens_of_all_choices_are_counted() -> None:
    client = openai_client(ScriptedEngine(["a</think>b", "abc", "</think>b"]), reasoning_parser="deepseek_r1")
    answer = ask(client, n=3)
    assert [choice.message.content for choice in answer.choices] == ["b", None, "b"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9 + 3 + 8


@pytest.mark.parametrize("ends", [[(7,)], [(7, 8, 9), (5, 5)]])
def test_reasoning_tokens_do_not_depend_on_deltas(ends: Sequence[tuple[int, ...]]) -> None:
    tokens = [1, 5, 7, 8, 7, 8, 9, 2, 7, 8, 9, 3]
    expected = 3 if ends == [(7,)] else 7
    for first in range(len(tokens) + 1):
        for second in range(first, len(tokens) + 1):
            counting = ReasoningTokens(ends, is_reasoning=True)
            num_tokens = 0
            for piece in (tokens[:first], tokens[first:second], tokens[second:]):
                num_tokens += len(piece)
                # The parser reports it late, as if its text were held back.
                counting.add(piece, [Reasoning("x")] if piece else [], is_reasoning=num_tokens < len(tokens))
            assert counting.count == expected
    none = ReasoningTokens(ends, is_reasoning=True)
    none.add([1, 2], [Content("x")], is_reasoning=False)
    none.add([3], [Content("x")], is_reasoning=False)
    assert none.count == 0, "the model did not reason"
    closed = ReasoningTokens(ends, is_reasoning=False)
    closed.add(tokens, [Content("x")], is_reasoning=False)
    assert closed.count == 0


def test_models_without_reasoning_report_no_reasoning_tokens() -> None:
    assert ask(openai_client(ScriptedEngine("hi"))).usage.completion_tokens_details is None


# `echo` in chats.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields, echoed",
    [
        ({"continue_final_message": True}, "It is"),
        ({"add_generation_prompt": False}, "It is"),
        ({}, "It is"),
        ({"messages": MESSAGES}, ""),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "It"}]}]}, "It"),
    ],
)
def test_echo_repeats_the_last_message_of_the_answers_role(stream: bool, fields: dict[str, Any], echoed: str) -> None:
    """As in vLLM: the last message comes first, if its role is the answer's."""
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    client = openai_client(ScriptedEngine([" fine.", " cold."]))
    extra = {"messages": messages, "echo": True, **fields}
    answer = ask(client, n=2, stream=stream, extra_body=extra)
    texts = ["", ""]
    if stream:
        for event in answer:
            texts[event.choices[0].index] += event.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts == [f"{echoed} fine.", f"{echoed} cold."]


@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_answer_is_no_reasoning(stream: bool) -> None:
    engine = ScriptedEngine(" world", " world")
    client = serve(engine, reasoning_parser="deepseek_r1")
    started = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    chat = {"messages": started, "continue_final_message": True, "structured_outputs": {"regex": "[a-z ]+"}}
    answer = client.post("/v1/chat/completions", json={**chat, "stream": stream})
    assert "reasoning_content" not in answer.text
    assert engine.requests_seen[-1][1].structured_outputs.begins_after is None, "the grammar applies from the start"
    answer = client.post("/v1/messages", json={"messages": started, "max_tokens": 9, "model": "tiny", "stream": stream})
    assert "thinking" not in answer.text.replace("thinking_tokens", "")


def test_an_answer_of_only_reasoning_can_be_sent_back() -> None:
    client = serve(ScriptedEngine("hm", "well"), reasoning_parser="deepseek_r1")
    message = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()["choices"][0]["message"]
    assert message["content"] is None
    again = client.post("/v1/chat/completions", json={"messages": [*MESSAGES, message, *MESSAGES]})
    assert again.status_code == 200, again.text
    for sent in ({"role": "assistant"}, {"role": "assistant", "reasoning": ""}, {"role": "user", "reasoning": "x"}):
        assert client.post("/v1/chat/completions", json={"messages": [sent]}).status_code == 400
