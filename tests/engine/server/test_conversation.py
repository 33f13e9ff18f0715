"""The same conversation in each API's format results in the same prompt, and no part of a message is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from stoker_engine.server.anthropic.request import MessagesRequest
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.responses.request import ResponsesRequest
from stoker_engine.tokens.tokenizer import Tokenizer

#: Writers of a message: the first iterates over parts and writes nothing for a string, the second needs a string.
WRITE_CONTENT = {
    "parts": "{% for p in m.content %}<{{ p['text'] }}>{% endfor %}",
    "string": "<{{ m.content + '' }}>",
}
TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}CONTENT\
{% for call in m.tool_calls or [] %}{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}\
{% endfor %}{{ m.tool_call_id }}
{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"""

Turn = tuple[str, list[str]]


def draw_conversation(draw: random.Random) -> list[Turn]:
    """Draw turns: (role, texts). The assistant's first text is its reasoning, its last one the argument of a call."""
    number = iter(range(100))

    def texts(least: int = 1) -> list[str]:
        return [f"text{next(number)}" for _ in range(draw.randint(least, 3))]

    turns: list[Turn] = [("system", texts())] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        turns.append(("user", texts()))
        turns.append(("assistant", [f"text{next(number)}" for _ in range(3)]))
        turns.append(("tool", texts()))
    return [*turns, ("user", texts())]


def chat(turns: Sequence[Turn]) -> ChatRequest:
    """Return `turns` as a chat."""
    messages: list[dict[str, Any]] = []
    for index, (role, texts) in enumerate(turns):
        message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        if role == "assistant":
            function = {"name": "f", "arguments": json.dumps({"x": texts[2]})}
            message |= {"reasoning": texts[0], "content": texts[1]}
            message["tool_calls"] = [{"id": f"c{index}", "type": "function", "function": function}]
        elif role == "tool":
            message["tool_call_id"] = f"c{index - 1}"
        messages.append(message)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return ChatCompletionRequest.model_validate({"messages": messages, "tools": tools}).to_request()


def responses(turns: Sequence[Turn]) -> ChatRequest:
    """Return `turns` in the Responses API."""
    items: list[dict[str, Any]] = []
    for index, (role, texts) in enumerate(turns):
        parts = [{"type": "input_text", "text": text} for text in texts]
        if role == "assistant":
            items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": texts[0]}]})
            items.append({"role": role, "content": texts[1]})
            call = {"call_id": f"c{index}", "name": "f", "arguments": json.dumps({"x": texts[2]})}
            items.append({"type": "function_call", **call})
        elif role == "tool":
            items.append({"type": "function_call_output", "call_id": f"c{index - 1}", "output": parts})
        else:
            items.append({"role": role, "content": parts})
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    return ResponsesRequest.model_validate({"input": items, "tools": tools}).to_request([])


def anthropic(turns: Sequence[Turn]) -> ChatRequest:
    """Return `turns` in Anthropic's API."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": []}
    for index, (role, texts) in enumerate(turns):
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        match role:
            case "system":
                body["system"] = blocks
                continue
            case "assistant":
                call = {"type": "tool_use", "id": f"c{index}", "name": "f", "input": {"x": texts[2]}}
                blocks = [{"type": "thinking", "thinking": texts[0], "signature": ""}, blocks[1], call]
            case "tool":
                blocks = [{"type": "tool_result", "tool_use_id": f"c{index - 1}", "content": blocks}]
        body["messages"].append({"role": "user" if role == "tool" else role, "content": blocks})
    body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    return MessagesRequest.model_validate(body).to_request(system_anywhere=True)


def written(request: ChatRequest, form: str) -> str:
    """Return the prompt, by a template that writes content in this form."""
    template = TEMPLATE.replace("CONTENT", WRITE_CONTENT[form])
    conversation = request.conversation
    return Tokenizer(Backend(WordLevel({}, "")), {}, template).chat_text(
        [message.for_template() for message in conversation.messages],
        tools=[tool.for_template() for tool in conversation.tools],
    )


@pytest.mark.parametrize("form", WRITE_CONTENT)
def test_parts_of_each_api_reach_the_template(form: str) -> None:
    draw = random.Random(5)
    for _ in range(20):
        turns = draw_conversation(draw)
        expected = written(chat(turns), form)
        for role, texts in turns:
            if role != "assistant":
                between = "><" if form == "parts" else "\n"
                assert f"[{role}]<{between.join(texts)}>" in expected
            else:
                assert all(text in expected for text in texts)
        assert written(responses(turns), form) == expected
        assert written(anthropic(turns), form) == expected


def test_a_failed_tool_result_starts_with_error() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": content}
        for content in (None, "no", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "Error: gone")
    ]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": results}]}
    messages = MessagesRequest.model_validate(body).to_request(system_anywhere=True).conversation.messages
    parts = [{"type": "text", "text": text} for text in ("Error: a", "b")]
    contents = [message.for_template()["content"] for message in messages]
    assert contents == ["Error", "Error: no", parts, "Error: gone"]


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "arguments": None}])
def test_a_call_without_arguments_has_an_empty_object(function: dict[str, Any]) -> None:
    """Templates write the arguments as JSON: null would be a different call."""
    message = {"role": "assistant", "tool_calls": [{"function": function}]}
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": [message]})
    [call] = body.messages[0].tool_calls or []
    assert call.function.arguments == {}
