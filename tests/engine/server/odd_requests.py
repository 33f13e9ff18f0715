"""Random unusual requests: mutated bodies, combined fields, bytes that are almost HTTP."""

from __future__ import annotations

import copy
import json
import random
import string
from typing import Any

#: Placeholder of the folder from which adapters may be loaded, with `FOLDERS`.
ADAPTERS = "/adapters"
FOLDERS = ("good", "truncated", "foreign", "empty")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 4,
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"7": 5.0, "8": -5},
    "bad_words": ["fox", "dog"],
    "seed": 3,
    "stop": ["q", "over"],
    "stop_token_ids": [9],
    "min_tokens": 1,
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 8,
    "return_token_ids": True,
    "cache_salt": "s",
    "priority": 0,
    "request_id": "r",
    "user": "me",
    "metadata": {"a": "b"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
#: Valid requests, into which mutations are inserted.
CORPUS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**SAMPLING, "prompt": "the quick", "logprobs": 3, "echo": True}),
    ("/v1/completions", {**SAMPLING, "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 2}),
    ("/v1/completions", {"prompt": "the", "use_beam_search": True, "n": 3, "max_tokens": 5, "length_penalty": 0.5}),
    (
        "/v1/chat/completions",
        {
            **SAMPLING,
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "5"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"a": [1, {"b": None}]},
        },
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "id": "i", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "5"},
                {
                    "type": "message",
                    "id": "m",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "5", "annotations": [], "logprobs": []}],
                },
                {"role": "user", "content": "and?"},
            ],
            "max_output_tokens": 4,
            "truncation": "auto",
            "temperature": 0.7,
            "top_p": 0.9,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": None, "summary": "auto"},
            "tools": [{"type": "function", **TOOL["function"], "strict": False}],  # type: ignore[dict-item]
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "metadata": {"a": "b"},
            "store": False,
            "user": "me",
            "seed": 3,
        },
    ),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5, "stream": True, "request_id": "one"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5, "previous_response_id": "one"}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
            ],
            "stop_sequences": ["q"],
            "temperature": 0.7,
            "top_k": 5,
            "metadata": {"user_id": "me"},
            "thinking": {"type": "disabled"},
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 2000,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "system": "x"}),
    (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}, "n": 2, "logprobs": 1},
    ),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "[a-c]{2}x?"}, "stream": True, "seed": 1}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": 'root ::= "a" | "(" root ")"'}}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
            "max_tokens": 8,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "structured_outputs": {
                "structural_tag": {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]},
            },
            "stream": True,
        },
    ),
    ("/tokenize", {"prompt": "the quick", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    (LOAD, {"lora_name": "ada", "lora_path": f"{ADAPTERS}/good", "load_inplace": True}),
    (UNLOAD, {"lora_name": "ada"}),
]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 20, 21, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e-308, 1e308),
    *(
        "",
        " ",
        "\x00",
        "é",
        "🦊",
        "👨‍👩‍👧",
        "\u202e",
        "\ufffd",
        "a" * 5000,
        "{{ 1/0 }}",
        "</s>",
        "%s%n",
        "../..",
        "NaN",
    ),
    *([], [[]], [None], [0] * 2000, [""], ["a"] * 20, [[5] * 600], [-1], [511, 512], [True], {}, {"a": 1}, {"": ""}),
    *({"type": "text"}, {"role": "user"}, {"0": 100}, {"7": 1e9}),
]
#: Fields that are valid together; a request contains some of them.
VALID: dict[str, list[Any]] = {
    "model": ["tiny", "ada", "bob", "nobody"],
    "max_tokens": [1, 3, 8, 16],
    "n": [1, 2, 5],
    "temperature": [0, 0.5, 1, 5],
    "top_p": [0.1, 1],
    "top_k": [-1, 1, 50],
    "min_p": [0, 0.3],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [0.5],
    "repetition_penalty": [0.5, 1.5],
    "logit_bias": [{"7": 100}, {str(token): -100 for token in range(200)}],
    "allowed_token_ids": [[5], list(range(100, 300))],
    "bad_words": [["the"], [" dog", "fox"]],
    "seed": [0, 7, -1],
    "stop": ["a", ["the", "\x00", "é"]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[5, 6], list(range(0, 512, 2))],
    "min_tokens": [0, 1],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [-1, 1, 5],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "cache_salt": ["a", "b"],
    "stream": [True],
    "structured_outputs": [
        {"json": SCHEMA},
        {"choice": ["a", "the"]},
        {"regex": "[0-9]*"},
        {"json_object": True, "disable_any_whitespace": True},
    ],
    "use_beam_search": [True],
}
COMPLETION: dict[str, list[Any]] = {
    "prompt": ["", "the", "the quick brown fox jumps over", ["a", "the dog", "🦊"], [5] * 20, [[5], [6, 7, 8]]],
    "logprobs": [0, 3, 20],
    "echo": [True],
    "prompt_logprobs": [0, 2],
}
CHAT: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": text}] for text in ("", "hi", "the lazy dog", "🦊")],
    "logprobs": [True],
    "top_logprobs": [0, 3],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True],  # then the model does not reason first
    "tools": [[TOOL], [{**TOOL, "function": {**TOOL["function"], "strict": True}}]],  # type: ignore[dict-item]
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
}
RESPONSES: dict[str, list[Any]] = {
    "input": ["", "hi", [{"role": "user", "content": "the lazy dog"}], [{"role": "user", "content": []}]],
    "model": ["tiny", "ada", "bob", "nobody"],
    "max_output_tokens": [1, 3, 8],
    "instructions": ["", "be brief"],
    "temperature": [0, 0.5, 5],
    "top_k": [-1, 5],
    "stop": ["a", ["the", "é"]],
    "include": [[], ["message.output_text.logprobs"]],
    "tools": [[], [{"type": "function", "name": "f"}]],
    "truncation": ["auto", "disabled"],
    "store": [True, False],
    "stream": [True],
    "request_id": ["one", "two"],
    "previous_response_id": ["one", "two"],
}
ADAPTER: dict[str, list[Any]] = {
    "lora_name": ["ada", "bob"],
    "lora_path": [f"{ADAPTERS}/{folder}" for folder in ("good", *FOLDERS, "nothing", "..")],
    "load_inplace": [True, False],
}
HEADS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nX-Request-Id: a\r\n"
    b"Content-Type: application/json; charset=utf-8\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n",
    b"GET /v1/models?x=1 HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nX: %d\r\n\r\n",
    b"POST /tokenize HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
]


def _mutate(rng: random.Random, value: Any) -> Any:
    """Return `value` with a random mutation."""
    value = copy.deepcopy(value)
    parents = [value]
    for parent in parents:
        children = parent.values() if isinstance(parent, dict) else parent
        parents += [child for child in children if isinstance(child, dict | list) and child]
    for _ in range(rng.randint(0, 3)):
        parent = rng.choice(parents)
        if not parent:
            continue
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent["".join(rng.choices(string.printable, k=3))] = rng.choice(ODD)
            case 2:
                parent[key] = [parent[key]] * rng.randint(1, 3)
            case 3:
                _, other = rng.choice(CORPUS)
                parent[key] = rng.choice(list(other.values()))
            case _:
                parent[key] = rng.choice(ODD)
    return value


def mutated_body(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(CORPUS)
    text = json.dumps(_mutate(rng, body), ensure_ascii=rng.random() < 0.5)
    match rng.randrange(20):
        case 0:
            text = text[: rng.randrange(len(text) + 1)]
        case 1:
            text = text.replace(rng.choice(',:{}[]"'), rng.choice(["", ",", "\\ud800", "\\u0000", "1e999", "NaN"]), 1)
        case 2:
            text = "[" * rng.randint(1, 5000) + text
        case 3:
            text = text[:-1] + ', "max_tokens": 1, "max_tokens": 2}'
    return path, text.encode(errors="surrogatepass")


def combined_body(rng: random.Random) -> tuple[str, bytes]:
    if rng.random() < 0.1:
        path = rng.choice([LOAD, LOAD, UNLOAD])
        names = ["lora_name"] if path == UNLOAD else list(ADAPTER)
        return path, json.dumps({name: rng.choice(ADAPTER[name]) for name in names}).encode()
    path, own_fields, limit = rng.choice(
        [
            ("/v1/completions", COMPLETION, "max_tokens"),
            ("/v1/chat/completions", CHAT, "max_tokens"),
            ("/v1/responses", RESPONSES, "max_output_tokens"),
        ]
    )
    subject = next(iter(own_fields))
    all_fields = own_fields if own_fields is RESPONSES else {**VALID, **own_fields}
    chosen = {subject, limit, *rng.sample(list(all_fields), rng.randint(0, 6))}
    return path, json.dumps({name: rng.choice(all_fields[name]) for name in sorted(chosen)}).encode()


def malformed_http(rng: random.Random) -> bytes:
    _, body = mutated_body(rng)
    raw = bytearray(rng.choice(HEADS) % len(body) + body)
    end = max(1, raw.find(b"\r\n\r\n"))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(end if rng.random() < 0.8 else len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at : at + rng.randint(1, 20)]
            case 2:
                raw[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                raw[at:at] = rng.choice(
                    [b"\r\n", b"\x00", b"Transfer-Encoding: chunked\r\n", b" ", b"Expect: 100-continue\r\n"]
                )
        end = min(end, len(raw))
        if not raw:
            break
    return bytes(raw)
