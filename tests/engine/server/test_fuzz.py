"""Unusual requests to the real server on a tiny model, over real sockets.

There are five kinds: schemathesis's requests for the server's OpenAPI schema, valid fields in all combinations, mutated
valid bodies, bytes that are almost HTTP, and clients that disconnect. Each client that waits must get a response, never
a 5xx, in OpenAI's format. Afterwards the block pool is balanced, no internal error was logged, and the server's output
still equals transformers'.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from peft import LoraConfig, get_peft_model
from schemathesis.generation import GenerationMode
from transformers import AutoModelForCausalLM

from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs

from ..conftest import AssertGreedy
from .conftest import CHAT_TEMPLATE, Serving, sample, wait_until
from .odd_requests import ADAPTERS, FOLDERS, LOAD, UNLOAD, combined_body, malformed_http, mutated_body

#: Short sequences, so that ten thousand requests take minutes.
MAX_MODEL_LEN = 48
MAX_BYTES = 65536


class Fuzzed:
    """The server under test, with its responses.

    Args:
        adapters: folder with `odd_requests.FOLDERS`.

    Attributes:
        statuses: number of responses by status.
    """

    def __init__(self, url: str, adapters: Path) -> None:
        self.url = url
        self._adapters = str(adapters).encode()
        self.statuses: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()

    def send(self, method: str, path: str, content: bytes, content_type: str) -> None:
        """Send a request, and check its response."""
        if not hasattr(self._local, "client"):
            self._local.client = httpx.Client(base_url=self.url, timeout=60, headers={"x-api-key": "admin"})
        content = content.replace(ADAPTERS.encode(), self._adapters)
        response = self._local.client.request(method, path, content=content, headers={"content-type": content_type})
        self._check(path, response, content)

    def send_raw(self, raw: bytes) -> None:
        """Send bytes, followed by a flood, so that the server does not wait for more; check the response."""
        parts = httpx.URL(self.url)
        received = b""
        with socket.create_connection((parts.host, parts.port or 0), timeout=60) as connection:
            # It may respond and close before it has read everything.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(raw + b"\r\n\r\n" + b"A" * 3 * MAX_BYTES)
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    received += piece
        assert received.startswith(b"HTTP/1.1 "), raw
        status = int(received.split(b" ", 2)[1])
        assert status < 500, (raw, received[:2000])
        with self._lock:
            self.statuses[status] += 1

    def _check(self, path: str, response: httpx.Response, sent: bytes) -> None:
        status, content_type, body = response.status_code, response.headers.get("content-type", ""), response.content
        is_anthropics = path.startswith("/v1/messages")
        assert status < 500, (sent, body)
        assert status != 422, sent
        if status >= 400:
            error = json.loads(body)["error"]
            assert set(error) - {"details"} == (
                {"message", "type"} if is_anthropics else {"message", "type", "param", "code"}
            )
            assert error["message"]
            assert b"Traceback" not in body
        elif content_type.startswith("text/event-stream"):
            *_, last, end = body.split(b"\n\n")
            ends = (b"data: [DONE]", b"event: response.completed\n", b"event: response.incomplete\n")
            assert last.startswith((b"event: message_stop\n",) if is_anthropics else ends), (sent, body[-500:])
            assert not end
        elif content_type.startswith("application/json"):
            json.loads(body, parse_constant=pytest.fail)
        with self._lock:
            self.statuses[status] += 1


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the model, and some invalid ones."""
    root = tmp_path_factory.mktemp("adapters")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    good, truncated, foreign, empty = (root / name for name in FOLDERS)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(str(good))
    for folder in (truncated, foreign):
        shutil.copytree(good, folder)
    tensors = truncated / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    (foreign / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    empty.mkdir()
    return root


@pytest.fixture(scope="module")
def served(tiny_llama: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("admin")
    engine = EngineArgs(
        str(tiny_llama),
        served_model_name=("tiny",),
        num_gpu_blocks_override=64,  # few blocks also cause preemptions
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=2,
    )
    frontend = FrontendArgs(
        shutdown_grace=0,
        max_request_bytes=MAX_BYTES,
        h11_max_incomplete_event_size=MAX_BYTES,
        trust_request_chat_template=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        allow_runtime_lora_updating=True,
        admin_api_key_file=str(keys),
        lora_dir=(str(adapters),),
        uvicorn_log_level="critical",
        disable_uvicorn_access_log=True,
    )
    llm = AsyncLLM(engine, chat_template=CHAT_TEMPLATE)
    serving = Serving(ServeArgs(engine, frontend), llm)
    try:
        wait_until(lambda: llm.is_ready)
        yield serving
    finally:
        serving.call(serving.server.stop, 2)
        serving.join()
        llm.shutdown()


@pytest.fixture
def fuzzed(
    served: Serving, tiny_llama: Path, adapters: Path, assert_greedy: AssertGreedy, caplog: pytest.LogCaptureFixture
) -> Iterator[Fuzzed]:
    """The server; at the end of the test it must be in its initial state."""
    caplog.set_level(logging.ERROR)
    yield Fuzzed(served.url, adapters)
    mistakes = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not mistakes
    assert httpx.get(f"{served.url}/health").status_code == 200
    wait_until(lambda: sample(served.url, "vllm:num_requests_running") == 0, 30)
    assert sample(served.url, "vllm:num_requests_waiting") == 0
    assert sample(served.url, "vllm:kv_cache_usage_perc") == 0
    assert httpx.get(f"{served.url}/load").json() == {"server_load": 0}
    body = {"prompt": [[5, 6, 7], [8] * 20], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    for salt in ({}, {"cache_salt": str(random.random())}):  # cached, and computed again
        whole = {**body, "return_token_ids": True, **salt}
        answer = httpx.post(f"{served.url}/v1/completions", json=whole, timeout=60).json()
        for prompt, choice in zip(body["prompt"], answer["choices"], strict=True):  # type: ignore[call-overload]
            assert_greedy(tiny_llama, prompt, choice["token_ids"])


def _by_schema(fuzzed: Fuzzed, count: int) -> None:
    schema: Any = schemathesis.openapi.from_dict(httpx.get(f"{fuzzed.url}/openapi.json").json())
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize", "/detokenize", LOAD, UNLOAD)
    examples = max(1, count // (2 * len(paths)))
    for path in paths:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _examples(fuzzed, path, schema[path]["POST"].as_strategy(generation_mode=mode), examples)


def _examples(fuzzed: Fuzzed, path: str, cases: Any, count: int) -> None:
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(cases)
    def send(case: Any) -> None:
        body = case.body
        if not isinstance(body, bytes):
            body = b"" if type(body).__name__ == "NotSet" else json.dumps(body).encode()
        fuzzed.send("POST", path, body, case.media_type or "application/json")

    send()


def _mutated(fuzzed: Fuzzed, count: int, seed: int) -> None:
    def send(number: int) -> None:
        rng = random.Random(seed + number)
        path, body = mutated_body(rng)
        method = rng.choice(["POST"] * 30 + ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
        content_type = rng.choice(["application/json"] * 30 + ["text/plain", "", "application/x-www-form-urlencoded"])
        fuzzed.send(method, path, body, content_type)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(count)))


def _combined(fuzzed: Fuzzed, count: int, seed: int) -> None:
    def send(number: int) -> None:
        path, body = combined_body(random.Random(seed + number))
        fuzzed.send("POST", path, body, "application/json")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(count)))


def _disconnecting(fuzzed: Fuzzed, count: int, seed: int) -> None:
    """Run clients that send a request and disconnect, some of them before it is complete."""

    def send(number: int) -> None:
        rng = random.Random(seed + number)
        path, body = combined_body(rng)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        raw = head.encode() + body
        parts = httpx.URL(fuzzed.url)
        with socket.create_connection((parts.host, parts.port or 0), timeout=60) as connection:
            connection.sendall(raw if rng.random() < 0.8 else raw[: rng.randrange(len(raw))])
            threading.Event().wait(rng.random() * 0.05)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(count)))


def _almost_http(fuzzed: Fuzzed, count: int, seed: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: fuzzed.send_raw(malformed_http(random.Random(seed + number))), range(count)))


def test_a_few_hundred_unusual_requests_are_answered(fuzzed: Fuzzed) -> None:
    _by_schema(fuzzed, 80)
    _combined(fuzzed, 150, seed=0)
    _mutated(fuzzed, 200, seed=0)
    _almost_http(fuzzed, 100, seed=0)
    _disconnecting(fuzzed, 50, seed=0)
    assert fuzzed.statuses[200] > 100, "many requests are valid"
    assert fuzzed.statuses[400] > 100
    assert not fuzzed.statuses[401], "each request has the required key"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # only against hangs
def test_ten_thousand_unusual_requests_are_answered(fuzzed: Fuzzed, part_of: Callable[[int], int]) -> None:
    _by_schema(fuzzed, part_of(1500))
    _combined(fuzzed, part_of(2500), seed=10_000)
    _disconnecting(fuzzed, part_of(1000), seed=10_000)
    _mutated(fuzzed, part_of(4500), seed=10_000)
    _almost_http(fuzzed, part_of(1800), seed=10_000)
    print(dict(fuzzed.statuses))  # noqa: T201
    assert fuzzed.statuses.total() >= part_of(10_000)
