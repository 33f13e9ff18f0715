"""What the server's tests share.

Faked: the engine, in `FakeEngine`; where a test takes `llm` or `address` it is the real one, on a tiny model.
Real: everything from the engine client's interface up to ASGI, and from `listen` on, sockets too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import RequestError
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.request import FinishReason
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.metrics import EngineMetrics
from stoker_engine.server.app import create_app
from stoker_engine.server.http_server import bind
from stoker_engine.server.service import Service

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class FakeTokenizer:
    """One token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        if messages[0]["content"] == "no template":
            raise RequestError("this model has no chat template", "messages")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages), False)


class FakeEngine:
    """Says `answer`, one character a token, to every prompt.

    Attributes:
        error: raised before any token.
        breaks_with: raised after three tokens.
        hangs_at: nothing comes after that many tokens.
        alive: requests that run.
        asked: the prompt and parameters of each request.
    """

    tokenizer = FakeTokenizer()
    max_model_len = 64

    def __init__(self) -> None:
        self.is_healthy = True
        self.answer = "hello world"
        self.error: Exception | None = None
        self.breaks_with: Exception | None = None
        self.hangs_at: int | None = None
        self.alive: set[str] = set()
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[OutputDelta, None]:
        self.asked.append((prompt_token_ids, params))
        if self.error is not None:
            raise self.error
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", "prompt")
        self.alive.add(request_id)
        answer = self.answer[: params.max_tokens]
        try:
            for index, character in enumerate(answer):
                if index == 3 and self.breaks_with is not None:
                    raise self.breaks_with
                if index == self.hangs_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                last = index == len(answer) - 1
                yield OutputDelta(
                    request_id=request_id,
                    text=character,
                    token_ids=[ord(character)],
                    finish_reason=(FinishReason.LENGTH if params.max_tokens == len(answer) else FinishReason.STOP)
                    if last
                    else None,
                    num_prompt_tokens=len(prompt_token_ids),
                    num_cached_tokens=2,
                )
        finally:
            self.alive.discard(request_id)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return create_app(Service(engine, ("tiny", "alias"), "/models/tiny", CollectorRegistry()))


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


Listen = Callable[[FastAPI], AbstractContextManager[tuple[str, int]]]


@pytest.fixture(scope="session")
def listen() -> Listen:
    """Serves an app on a real socket of this machine, from a thread."""

    @contextmanager
    def serve(app: FastAPI) -> Iterator[tuple[str, int]]:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
        with bind("127.0.0.1", 0) as bound:
            bound.listen()  # clients wait in line until the thread is there
            thread = threading.Thread(target=server.run, args=([bound],))
            thread.start()
            try:
                yield bound.getsockname()
            finally:
                server.should_exit = True
                thread.join()

    return serve


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[AsyncLLM]:
    """The real engine, running."""
    llm = AsyncLLM.from_args(EngineArgs(str(tiny_llama), num_gpu_blocks_override=1024), CHAT_TEMPLATE)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def address(llm: AsyncLLM, listen: Listen) -> Iterator[str]:
    """URL of the real engine's server."""
    metrics = EngineMetrics("tiny", llm.args, llm.max_model_len, llm.engine.runner.num_blocks)
    llm.engine.observer = metrics
    llm.start()
    with listen(create_app(Service(llm, ("tiny",), llm.args.model, metrics.registry))) as (host, port):
        yield f"http://{host}:{port}"
