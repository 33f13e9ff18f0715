"""Prompts → deltas: one request to the engine for each prompt, all running side by side into one stream."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field

from stoker_common.errors import EngineDeadError, EngineKilledError, RequestError
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.engine.admission import Admission, Ticket
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.unavailable import NotStartedError, UnavailableError
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import PromptTokens


@contextmanager
def renamed(field_names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the engine's name the client's instead."""
    try:
        yield
    except RequestError as error:
        error.param = field_names.get(error.param or "", error.param)
        raise


#: Makes the engine's names of requests unique: clients choose their own ids, and may choose one twice.
_serial = itertools.count()


@dataclass
class Output:
    """What became of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(eq=False)
class Generation:
    """What one HTTP request has the engine generate. Iterate `deltas` once, or `collect`.

    SamplingMetadata ``prompt × n + i`` is the i-th sequence of a prompt.

    Attributes:
        wait_ready: waits while an engine that died, since the prompts were tokenized or since it got them, is loaded
            again.
        hold_adapter: keeps the adapter of that name loaded and yields its number; see `AdapterRegistry.hold`.
        id: of the answer; the engine's requests are named after it.
        model: the name that the answer carries: the model's, or the adapter's.
        running: where it is to be found while it runs.
        field_names: what the client calls the engine's fields, for errors, where that is something else.
        report_cached: whether usage reports the prompt tokens that a prefix hit saved.
        report_output: whether what is generated is returned; else only the prompt is, and usage counts only that.
        created: when, in Unix seconds.
        prompt_logprobs: of each prompt, once its first delta has come, when asked for.
    """

    client: EngineClient
    wait_ready: Callable[[], Awaitable[None]]
    admission: Admission
    running: set[Generation]
    hold_adapter: Callable[[str], AbstractContextManager[int]]
    id: str
    model: str
    prompts: Sequence[PromptTokens]
    params: Sequence[RequestParams]
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict)
    report_cached: bool = True
    report_output: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)
    _completion_tokens: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)
    _adapter: int = NO_ADAPTER
    _stream: OutputStream = field(default_factory=OutputStream)
    _prompts_of: dict[str, int] = field(default_factory=dict)  # requests of the engine → which prompt is theirs
    _unfinished: dict[int, int] = field(default_factory=dict)  # prompts → how many of their sequences run
    _started: set[int] = field(default_factory=set)  # prompts that have had their first delta

    async def deltas(self) -> AsyncGenerator[list[tuple[int, OutputDelta]], None]:
        """Yields what there is, as soon as there is something: (index of a choice, delta), one a choice at most.

        The first error ends all of them. Closing the generator aborts all that still run.

        Raises:
            NotStartedError: the engine died meanwhile, and another one is not there in time; raised first.
            NotFoundError: the adapter was unloaded meanwhile; raised first.
            OverloadedError: a queue's limit is reached; raised first.
            RequestError: what the engine raised.
        """
        await self.wait_ready()
        with self.hold_adapter(self.model) as self._adapter:
            ticket = self.admission.admit([len(prompt) for prompt in self.prompts], self.n)
            self.running.add(self)
            self._unfinished = dict.fromkeys(range(len(self.prompts)), self.n)
            asking = asyncio.create_task(self._submit())
            crashes = 0
            try:
                while self._unfinished:
                    try:
                        deltas = await self._stream.get()
                    except EngineDeadError as death:
                        # Prompts go to another engine where no token of them was sent yet. If it was no signal
                        # from outside, one of them may be what the engine dies of, and they go on only once.
                        crashes += not isinstance(death, EngineKilledError)
                        if crashes > 1 or not self._started.isdisjoint(self._forget_lost()):
                            raise
                        asking.cancel()
                        asking = asyncio.create_task(self._resubmit())
                        continue
                    yield [
                        (self._count(delta, ticket), delta) for delta in deltas if delta.request_id in self._prompts_of
                    ]
            finally:
                asking.cancel()
                for request_id in self._prompts_of:
                    self.client.abort(request_id)
                self.admission.release(ticket)
                self.running.discard(self)

    async def collect(self) -> list[Output]:
        """Waits for everything; one output a choice."""
        outputs = [Output() for _ in range(len(self.prompts) * self.n)]
        async with aclosing(self.deltas()) as deltas:
            async for step in deltas:
                for choice, delta in step:
                    output = outputs[choice]
                    output.text += delta.text
                    output.token_ids += delta.token_ids
                    output.logprobs += delta.logprobs or []
                    output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        return outputs

    def fail(self, error: Exception) -> None:
        """Ends everything with `error`."""
        self._stream.fail(error)

    def usage(self, choice: int | None = None) -> Usage:
        """The tokens so far, of one choice or over all."""
        if choice is None:
            prompts = range(len(self.prompts))
            completion_tokens = sum(self._completion_tokens.values()) if self.report_output else 0
        else:
            prompts = range(choice // self.n, choice // self.n + 1)
            completion_tokens = self._completion_tokens.get(choice, 0) if self.report_output else 0
        prompt_tokens = sum(len(self.prompts[prompt]) for prompt in prompts)
        cached = sum(self._cached_tokens.get(prompt, 0) for prompt in prompts)
        return Usage(prompt_tokens, completion_tokens, cached if self.report_cached else None)

    def _count(self, delta: OutputDelta, ticket: Ticket) -> int:
        """Takes note of a delta, and returns whose it is."""
        prompt = self._prompts_of[delta.request_id]
        choice = prompt * self.n + delta.index
        if prompt not in self._started:
            self._started.add(prompt)
            self.admission.on_first_token(ticket, prompt)
        self._completion_tokens[choice] = self._completion_tokens.get(choice, 0) + len(delta.token_ids)
        self._cached_tokens[prompt] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt]:
                del self._unfinished[prompt]
        return choice

    async def _submit(self) -> None:
        """Begins a request for each prompt that has none. Whoever takes from the stream gets the errors."""
        try:
            for prompt in self._unfinished.keys() - self._prompts_of.values():
                request_id = f"{self.id}-{next(_serial)}"
                with renamed(self.field_names):
                    await self.client.add_request(
                        self._stream,
                        request_id,
                        self.prompts[prompt],
                        self.params[prompt],
                        priority=self.priority,
                        cache_salt=self.cache_salt,
                        adapter=self._adapter,
                    )
                self._prompts_of[request_id] = prompt
        except Exception as error:
            self._stream.fail(error)

    def _forget_lost(self) -> set[int]:
        """Forgets requests that an engine's death took along, so that what it still had on its way counts for nothing;
        their prompts."""
        lost = {
            request_id: prompt
            for request_id, prompt in self._prompts_of.items()
            if prompt in self._unfinished and not self.client.has(request_id)
        }
        for request_id in lost:
            self.client.abort(request_id)
            del self._prompts_of[request_id]
        return set(lost.values())

    async def _resubmit(self) -> None:
        """The same, of another engine, or the next one."""
        try:
            await self.wait_ready()
        except NotStartedError as error:
            self._stream.fail(UnavailableError(error.message))  # it was started, by the engine that died
        except Exception as error:
            self._stream.fail(error)
        else:
            await self._submit()
