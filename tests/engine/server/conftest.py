"""Shared fixtures of the server's tests.

Faked: the engine, in `FakeEngine`; tests that take `llm` or `address` use the real one, on a tiny model.
Real: everything from the engine client's interface up to ASGI, and from `listen` on, sockets too.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from stoker_common.errors import EngineDeadError, RequestError
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import Logprob, PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import RequestParams, SamplingParams
from stoker_engine.core.step_report import StepReport
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.server.app import create_app
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.http.bind import bind
from stoker_engine.server.http.http_protocol import http_protocol
from stoker_engine.server.http.http_server import Server, uvicorn_config
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_engine.tokens.content_format import ContentForms
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import PromptTokens

from ...support.waiting import HANGING_S, until, until_async

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class FakeVocabulary:
    """The vocabulary of `FakeTokenizer`: one token per character."""

    chat_template: str | None = CHAT_TEMPLATE

    def check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        if len(text) > max_model_len:
            raise RequestError("the text is too long", param, "context_length_exceeded")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token) for token in token_ids if token != 1 or not skip_special_tokens)

    def ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self.token_text(token) for token in token_ids]

    def token_text(self, token_id: int) -> str:
        return "^" if token_id == 1 else chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def special_token_ids(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset({1} if "^" in texts else ())


class FakeTokenizer:
    """One token per character.

    Attributes:
        rendered: arguments of the last rendered chat.
        encoded: all texts that were encoded.
    """

    rendered: dict[str, Any]

    def __init__(self) -> None:
        self.vocabulary = FakeVocabulary()
        self.encoded: list[str] = []

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.encoded += texts
        return [[1] * add_special_tokens + [ord(character) for character in text] for text in texts]

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.vocabulary.decode(token_ids, skip_special_tokens)

    async def compile_grammar(self, structured: StructuredOutputs) -> str:
        return compile_grammar(structured)

    async def chat_text(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        if messages[0]["content"] == "no template":
            raise RequestError("this model has no chat template", "messages")
        messages = _STRINGS.adapt(messages, "string")
        self.rendered = {"messages": messages, **kwargs}
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


#: The template writes strings, like those of text-only models.
_STRINGS = ContentForms(lambda messages, tools: "")


def fake_logprobs(token: int, top: int) -> PositionLogprobs:
    """Return log-probabilities: the token has a third of the probability, the next characters follow."""
    candidates = {token: Logprob(math.log(1 / 3), 2, chr(token))}
    for rank in range(top):
        candidates.setdefault(token + rank + 1, Logprob(math.log(0.5) - rank, rank + 1, chr(token + rank + 1)))
    return candidates


class FakeEngine:
    """Generates `answer` for every prompt, one character per token.

    Attributes:
        error: raised before any token.
        breaks_with: raised after three tokens.
        hangs_at: number of tokens after which requests hang that arrive while it is set.
        waits_for_reader: each token waits until the previous one is read; otherwise slow readers get several at once.
        alive: running requests.
        requests_seen: prompt and parameters of each request.
        options: further arguments of each request.
        loaded: set once the engine is loaded.
        death: set once it is dead.
        adapters: loaded adapters, by number.
        adapter_loads: all requested loads.
        adapters_asked: adapter of each request.
        adapters_come: event that all loads wait for.
        bad_adapters: errors of loads, by folder name.
        lost_adapters: reasons why adapters became unusable, by number.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[StepReport], None] | None = None
        self.on_later_load: Callable[[int], None] | None = None
        self.tokenizer = FakeTokenizer()
        self.info = EngineInfo(
            max_model_len=64,
            vocab_size=1_114_112,
            num_blocks=77,
            cache_groups=(CacheGroup(None, (0, 1), 128),),
            step_tokens=2048,
            block_size=16,
            eos_token_ids=(2,),
            max_num_seqs=8,
            sampling_defaults={},
            max_logprobs=20,
            seed=0,
        )
        self.is_live = self.is_ready = True
        self.is_stuck = False
        self.num_engines = 1
        self.status = "stepping"
        self.engine_states = [EngineState(0, True, message="serving", kv_blocks=77, kv_tokens=1216)]
        self.answer = "hello world"
        self.error: Exception | None = None
        self.breaks_with: Exception | None = None
        self.hangs_at: int | None = None
        self.waits_for_reader = True
        self.released = asyncio.Event()
        self.alive: set[str] = set()
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._hangs_at: dict[str, int | None] = {}
        self.requests_seen: list[tuple[list[int], SamplingParams]] = []
        self.options: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.adapters: dict[int, AdapterSource] = {}
        self.adapter_loads: list[AdapterSource] = []
        self.adapters_asked: list[int] = []
        self.adapters_come = asyncio.Event()
        self.adapters_come.set()
        self.bad_adapters: dict[str, Exception] = {}
        self.lost_adapters: dict[int, str] = {}
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.death = asyncio.Event()

    async def load(self, engine: int | None = None) -> EngineInfo:
        await self.loaded.wait()
        return self.info

    def info_of(self, engine: int) -> EngineInfo:
        return self.info

    def serves(self, engine: int) -> bool:
        return self.is_ready

    def has(self, request_id: str) -> bool:
        return request_id in self.alive

    async def wait_dead(self, engine: int = 0) -> EngineDeadError:
        await self.death.wait()
        return EngineDeadError("a test killed it")

    def shutdown(self) -> None:
        self.is_live = self.is_ready = False

    async def add_request(
        self,
        stream: OutputStream,
        request_id: str,
        prompt: PromptTokens,
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: int = NO_ADAPTER,
    ) -> int:
        self.requests_seen.append((prompt, params))  # type: ignore[arg-type]
        self.options.append({"priority": priority, "cache_salt": cache_salt})
        self.adapters_asked.append(adapter)
        self.names.append(request_id)
        if self.error is not None:
            raise self.error
        self._hangs_at[request_id] = self.hangs_at
        self.alive.add(request_id)
        self._answers[request_id] = asyncio.create_task(self._answer(stream, request_id, prompt, params, params.n))
        return params.n

    async def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        self.adapter_loads.append(source)
        await self.adapters_come.wait()
        if (error := self.bad_adapters.get(Path(source.path).name)) is not None:
            raise error
        self.adapters[source.number] = source
        return LoadedAdapter(digest=f"{source.number:064x}", rank=8, num_bytes=1000, seconds=0.01)

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]

    def adapter_error(self, number: int) -> str | None:
        return self.lost_adapters.get(number)

    def abort(self, request_id: str) -> None:
        self.alive.discard(request_id)
        if (answer := self._answers.pop(request_id, None)) is not None:
            answer.cancel()

    async def _answer(
        self, stream: OutputStream, request_id: str, prompt: list[int], params: RequestParams, n: int
    ) -> None:
        answer = self.answer[: params.max_tokens]
        for position in range(len(answer)):
            if position == 3 and self.breaks_with is not None:
                self.alive.discard(request_id)
                stream.fail(self.breaks_with)
                return
            if position == self._hangs_at[request_id]:
                await self.released.wait()
            await asyncio.sleep(0)
            await until_async(lambda: not (self.waits_for_reader and stream._pending))
            for index in range(n):
                stream.put(self._delta(request_id, prompt, params, answer, position, index))
            stream.wake()

    def _delta(
        self,
        request_id: str,
        prompt: list[int],
        params: RequestParams,
        answer: str,
        position: int,
        index: int,
    ) -> OutputDelta:
        """Sequence i of n generates each character shifted by i."""
        token = ord(answer[position]) + index
        delta = OutputDelta(
            request_id=request_id,
            index=index,
            text=chr(token),
            token_ids=[token],
            num_prompt_tokens=len(prompt),
            num_cached_tokens=2,
        )
        if params.logprobs is not None:
            delta = replace(delta, logprobs=[fake_logprobs(token, params.logprobs)])
        if params.prompt_logprobs is not None and position == 0:
            following = [fake_logprobs(token, params.prompt_logprobs) for token in prompt[1:]]
            delta = replace(delta, prompt_logprobs=[None, *following])
        if position == len(answer) - 1:
            reason = FinishReason.LENGTH if params.max_tokens == len(answer) else FinishReason.STOP
            delta = replace(delta, finish_reason=reason)
        return delta


MakeService = Callable[..., Service]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_service(engine: FakeEngine) -> MakeService:
    """Create a service of the fake engine; keywords are fields of FrontendArgs, `engine` changes EngineArgs."""

    def make(engine_args: dict[str, Any] | None = None, **frontend: Any) -> Service:
        args = EngineArgs("/models/tiny", served_model_name=("tiny", "alias"), **(engine_args or {}))
        service = Service(ServeArgs(args, FrontendArgs(**frontend)), engine)
        service.on_loaded(engine.info)
        return service

    return make


@pytest.fixture
def app(make_service: MakeService) -> FastAPI:
    return create_app(make_service())


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


MakeClient = Callable[..., TestClient]


@pytest.fixture
def make_client(make_service: MakeService) -> MakeClient:
    """Create a client of a service with these arguments."""

    def make(**kwargs: Any) -> TestClient:
        return TestClient(create_app(make_service(**kwargs)), raise_server_exceptions=False)

    return make


Listen = Callable[[FastAPI], AbstractContextManager[tuple[str, int]]]


@pytest.fixture(scope="session")
def listen() -> Listen:
    """Serve an app on a real socket of this machine, from a thread."""

    @contextmanager
    def serve(app: FastAPI) -> Iterator[tuple[str, int]]:
        config = uvicorn.Config(
            app,
            http=http_protocol(FrontendArgs()),
            ws="none",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        with bind("127.0.0.1", 0) as bound:
            bound.listen()  # connections queue until the thread serves
            thread = threading.Thread(target=server.run, args=([bound],))
            thread.start()
            try:
                yield bound.getsockname()
            finally:
                server.should_exit = True
                thread.join()

    return serve


class Serving:
    """A server in a thread, as run by `serve`, without signals.

    Attributes:
        url: its URL.
        service: the served service.
        stop: starts the shutdown, like a signal.

    Args:
        loop: event loop, as uvicorn names it; "auto": the one that servers use.
    """

    def __init__(self, args: ServeArgs, client: Any, loop: Literal["auto", "asyncio"] = "auto") -> None:
        self.service = Service(args, client)
        self._bound = bind("127.0.0.1", 0)
        self._bound.listen()
        host, port = self._bound.getsockname()
        self.url = f"http://{host}:{port}"
        config = uvicorn_config(self.service)
        config.loop = loop
        self.server = Server(config, self.service, self.url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run_loop)
        self._thread.start()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self._bound:
            await self.server.serve([self._bound])

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the event loop."""
        until(lambda: self._loop is not None, "the event loop runs")
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def join(self, seconds: float = HANGING_S) -> None:
        """Wait until the server has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server does not end"


@contextmanager
def serving_fake(
    engine: FakeEngine, *, enable_lora: bool = False, loop: Literal["auto", "asyncio"] = "auto", **frontend: Any
) -> Iterator[Serving]:
    """Serve the fake engine with these fields of FrontendArgs."""
    args = ServeArgs(EngineArgs("tiny", enable_lora=enable_lora), FrontendArgs(**frontend))
    served = Serving(args, engine, loop)
    try:
        yield served
    finally:
        for _ in range(2):
            with suppress(RuntimeError):  # it has ended already
                served.call(served.server.stop, signal.SIGINT)
        served.join()


@pytest.fixture(scope="module")
def serving(tiny_llama: Path) -> Iterator[Serving]:
    """The real engine, served."""
    engine = EngineArgs(str(tiny_llama), served_model_name=("tiny",), num_gpu_blocks_override=1024)
    llm = AsyncLLM(engine, chat_template=CHAT_TEMPLATE)
    serving = Serving(ServeArgs(engine, FrontendArgs(shutdown_grace=0)), llm)
    try:
        wait_until(lambda: llm.is_ready)
        yield serving
    finally:
        serving.call(serving.server.stop, 2)
        serving.join()
        llm.shutdown()


@pytest.fixture(scope="module")
def address(serving: Serving) -> str:
    """URL of the real engine's server."""
    return serving.url


wait_until = until


def sample(url: str, name: str, **labels: str) -> float:
    """Return a value of /metrics for the model `tiny`."""
    labels = {"model_name": "tiny", "engine": "0", **labels}
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return next(sample.value for sample in samples if sample.labels == labels)
