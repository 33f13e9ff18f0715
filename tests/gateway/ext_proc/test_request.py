"""Parsing of request bodies, and the cost of hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from typing import Any

import pytest

from stoker_common.block_hash import CacheKeys
from stoker_common.errors import RequestError
from stoker_common.text_prefix_hash import text_chain
from stoker_gateway.ext_proc.body_reader import BodyReader
from stoker_gateway.ext_proc.errors import UnavailableError
from stoker_gateway.ext_proc.request import ModelRequest, prompt_text, read_request

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

#: Conversations by API; each starts with the shorter one.
_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello " * 300},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "it is raining"}]},
    {"role": "assistant", "content": "oh " * 500},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:abc"}}, {"type": "text", "text": "?"}],
    },
]
_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello " * 300}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm " * 300}]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "it is raining " * 100},
]
_BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hello " * 300}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": "it"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain " * 300}]},
]


def _read(path: str, **body: Any) -> ModelRequest:
    return read_request(path, json.dumps({"model": "m", **body}).encode())


@pytest.mark.parametrize(("name", "items"), [("messages", _TURNS), ("input", _ITEMS), ("messages", _BLOCKS)])
def test_text_of_a_longer_conversation_starts_with_the_shorter_ones(name: str, items: list[dict[str, Any]]) -> None:
    before = b""
    for number in range(len(items) + 1):
        text = prompt_text({"tools": TOOLS, "instructions": "be brief", name: items[:number]})
        assert text.startswith(before) and len(text) > len(before)
        before = text
        if number:  # each word matters
            different = json.loads(json.dumps(items[:number]).replace(" rain", " snow").replace("hello", "hallo"))
            assert (prompt_text({name: different}) != prompt_text({name: items[:number]})) == (
                different != items[:number]
            )


def test_forms_of_the_same_prompt_are_the_same_text() -> None:
    parts = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    assert prompt_text({"messages": [{"role": "user", "content": "hello"}]}) == prompt_text(
        {"messages": [{"content": parts, "role": "user"}]}
    )
    assert prompt_text({"input": "hello"}) == prompt_text({"input": [{"role": "user", "content": "hello"}]})
    billed = [{"type": "text", "text": f"x-anthropic-billing-header: {n}"} for n in range(2)]
    system = {"type": "text", "text": "be kind"}
    assert prompt_text({"system": [billed[0], system]}) == prompt_text({"system": [billed[1], system]})
    assert prompt_text({"system": [billed[0], system]}) == prompt_text({"system": "be kind"})
    block = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    marked = block | {"cache_control": {"type": "ephemeral"}}
    assert prompt_text({"messages": [{"content": [block]}]}) == prompt_text({"messages": [{"content": [marked]}]})
    tools = [*TOOLS, {"name": "look", "input_schema": {}}, "odd"]
    hinted = [each | {"cache_control": {"type": "ephemeral"}} if isinstance(each, dict) else each for each in tools]
    assert prompt_text({"tools": tools}) == prompt_text({"tools": hinted})
    assert prompt_text({"tools": TOOLS, "input": "x"}) != prompt_text({"input": "x"})


def test_text_of_completion_prompts_keeps_their_prefixes() -> None:
    assert prompt_text({"prompt": "é"}) == "é".encode()
    tokens = list(range(1000))
    assert prompt_text({"prompt": tokens}).startswith(prompt_text({"prompt": tokens[:900]}))
    assert prompt_text({"prompt": ["one", "two"]}).startswith(b"one")
    assert prompt_text({"prompt": [tokens, [1]]}).startswith(prompt_text({"prompt": tokens}))
    odd: tuple[Any, ...] = ([], [True], [1, "x"], [2**40], [-1], [1.5], [[1.5]], [["x"]], [None], {}, 7, [[[[]]]])
    for prompt in odd:
        assert isinstance(prompt_text({"prompt": prompt}), bytes)


def test_session_salt_and_request_id_are_read_from_the_body() -> None:
    assert _read(COMPLETIONS, prompt="x", prompt_cache_key="k", user="u").session == "k"
    assert _read(CHAT, user="u").session == "u"
    assert _read(MESSAGES, metadata={"user_id": "s"}).session == "s"
    for odd in (None, "", 7, ["u"], {}):
        assert _read(CHAT, user=odd, metadata=odd, cache_salt=odd, request_id=odd).session is None
    long = "x" * 9000
    request = _read(COMPLETIONS, prompt=long, cache_salt="s", request_id="r")
    assert list(request.chain) == text_chain(long.encode(), "m", CacheKeys("s"))
    assert (request.size, request.request_id) == (9000, "r")
    assert request.chain[0] not in _read(COMPLETIONS, prompt=long).chain
    assert request.chain[0] not in _read(COMPLETIONS, model="n", prompt=long, cache_salt="s").chain
    continued = _read(RESPONSES, input=long, previous_response_id="resp_1")
    assert (continued.previous_response_id, list(continued.chain)) == ("resp_1", [])
    assert continued.size >= 9000
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/embeddings"):
        read = _read(path, prompt=long, messages=[], input=long)
        assert replace(read, prompt_tokens=0) == ModelRequest("m", [])


_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "user", "metadata", "cache_salt",
           "prompt_cache_key", "previous_response_id", "request_id")  # fmt: skip
_INNER = ("role", "content", "type", "text", "name", "output", "arguments", "tool_calls", "cache_control")


def _value(rng: random.Random, depth: int = 5) -> Any:
    """Return random JSON, mostly of a shape that the parser inspects."""
    kind = rng.randrange(12 if depth else 8)
    if kind < 8:
        return (None, True, 0, -(2**63), 2**70, 1.5, "", "\x00é😀")[kind]
    if kind < 10:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {name: _value(rng, depth - 1) for name in rng.sample(_INNER, rng.randrange(5))}


def test_any_json_with_a_model_is_read() -> None:
    rng = random.Random(1)
    sizes = set()
    for _ in range(3000):
        fields = {name: _value(rng) for name in rng.sample(_FIELDS, rng.randrange(len(_FIELDS)))}
        body = json.dumps(fields | {"model": "m"}).encode()
        path = rng.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize"])
        request = read_request(path, body)
        assert request.model == "m" and request == read_request(path, body)
        sizes.add(request.size)
    assert len(sizes) > 100


def test_hostile_bodies_are_read_or_refused() -> None:
    rng = random.Random(0)
    valid = json.dumps({"model": "m", "messages": _TURNS, "tools": TOOLS, "n": -1.5e300}).encode()
    deep = [b'{"model":"m","tools":' + b"[" * n + b"]" * n + b"}" for n in (200, 253, 254, 255, 1020, 1024, 40_000)]
    deep += [b'{"model":"m","messages":[{"content":' + b'[{"a":' * n + b"1" + b"}]" * n + b"}]}" for n in (100, 500)]
    odd = [b'{"model":"m","x":%s}' % x for x in (b"9" * 300, b"9" * 60_000, b"1e400", b"-0", b"Infinity", b"NaN",
           b'"\\ud800"', b'"\\udc00\\ud800"', b"\xed\xa0\x80", b'"\xff"', b'"\x00"', b"/**/1")]  # fmt: skip
    odd += [b'{"model":"a","model":"m"}', b"\xef\xbb\xbf{}", b"null", b'"m"', b"1", b"\x00" * 99, b"{" * 60_000]
    mutated = []
    for _ in range(3000):
        body = bytearray(valid)
        for _ in range(rng.randint(1, 8)):
            at, end = sorted(rng.randrange(len(body) + 1) for _ in range(2))
            body[at : rng.choice([at, at + 1, end])] = rng.choice(
                [b"", b'"', b"[", b"]", b"{", b"}", b"\\u", b"\xff", b"null", b",", bytes(body[at:end])]
            )[:5000]
        mutated.append(bytes(body))
    read = 0
    for body in (*deep, *odd, *mutated):
        try:
            read += read_request(rng.choice([CHAT, MESSAGES, COMPLETIONS, RESPONSES]), body).model == "m"
        except RequestError as error:
            assert error.message and error.status == 400
    assert read > 50
    assert read_request(CHAT, b'{"model":"a","model":"m"}').model == "m"  # the last one applies, as in engines


def test_large_bodies_are_parsed_in_a_subprocess_with_equal_results() -> None:
    async def main() -> None:
        reader = BodyReader(at_once=100)
        try:
            bodies = [json.dumps({"model": "m", "user": "é", "prompt": "x" * n}).encode() for n in (0, 99, 10**6)]
            read = await asyncio.gather(*(reader.read(COMPLETIONS, body) for body in bodies * 3))
            assert read == [read_request(COMPLETIONS, body) for body in bodies * 3]
            for body in (b"{" * 200, b" " * 200 + b"{}", b'{"model": 7}' + b" " * 200):
                with pytest.raises(RequestError) as direct:
                    read_request(CHAT, body)
                with pytest.raises(RequestError) as elsewhere:
                    await reader.read(CHAT, body)
                assert vars(direct.value) == vars(elsewhere.value)
            # A cancelled request does not affect the results of the others.
            cancelled = [asyncio.ensure_future(reader.read(COMPLETIONS, bodies[2])) for _ in range(3)]
            await asyncio.sleep(0)
            for each in cancelled:
                each.cancel()
            assert (await reader.read(COMPLETIONS, bodies[1])).size == 99
        finally:
            await reader.close()

    asyncio.run(main())


def test_a_reader_that_dies_or_hangs_is_replaced() -> None:
    async def main() -> None:
        reader = BodyReader(at_once=10)
        body = json.dumps({"model": "m", "prompt": "x" * 10**6}).encode()
        try:
            await reader.read(COMPLETIONS, body)
            assert reader.pid is not None
            os.kill(reader.pid, signal.SIGSTOP)
            reading = asyncio.ensure_future(reader.read(COMPLETIONS, body))
            await asyncio.sleep(0)
            os.kill(reader.pid, signal.SIGKILL)
            with pytest.raises(UnavailableError):
                await reading
            assert (await reader.read(COMPLETIONS, body)).size == 10**6
            first = reader.pid
            os.kill(first, signal.SIGSTOP)
            reader.longest_s = 0.05
            with pytest.raises(UnavailableError):
                await reader.read(COMPLETIONS, body)
            reader.longest_s = 30
            assert (await reader.read(COMPLETIONS, body)).size == 10**6
            assert reader.pid != first
        finally:
            await reader.close()

    asyncio.run(main())
