"""Prompts → deltas: one engine request per prompt, all merged into one stream."""

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
    """Translate the names of fields in errors to the client's."""
    try:
        yield
    except RequestError as error:
        error.param = field_names.get(error.param or "", error.param)
        raise


#: Makes ids of engine requests unique, because clients may choose their own ids and repeat them.
_serial = itertools.count()


@dataclass
class Output:
    """Complete output of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(eq=False)
class Generation:
    """The engine requests of one HTTP request. Iterate `deltas` or call `collect`, once.

    Choice ``prompt × n + i`` is the i-th sequence of a prompt.

    Attributes:
        wait_ready: waits until an engine is ready; see `Service.wait_ready`.
        hold_adapter: keeps the named adapter loaded and yields its number; see `AdapterRegistry.hold`.
        id: id of the answer, from which the ids of the engine's requests are derived.
        model: name in the answer: the model's, or the adapter's.
        running: set that contains this object while it runs.
        stream_interval: minimum number of tokens of a choice's deltas, except the first, the last and those before an
            error.
        field_names: the engine's field names → the client's, for errors.
        report_cached: whether usage reports prompt tokens found in the prefix cache.
        report_output: whether usage reports generated tokens.
        front_end: unique part of this front end's engine request ids; empty with one front end.
        created: time of creation, in Unix seconds.
        prompt_logprobs: index of a prompt → its logprobs, if requested and received.
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
    stream_interval: int = 1
    field_names: Mapping[str, str] = field(default_factory=dict)
    report_cached: bool = True
    report_output: bool = True
    front_end: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)
    _completion_tokens: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)
    _adapter: int = NO_ADAPTER
    _stream: OutputStream = field(default_factory=OutputStream)
    _prompts_of: dict[str, int] = field(default_factory=dict)  # id of an engine request → index of its prompt
    _unfinished: dict[int, int] = field(default_factory=dict)  # index of a prompt → number of unfinished sequences
    _started: set[int] = field(default_factory=set)  # indices of prompts with output

    async def deltas(self, *, whole: bool = False) -> AsyncGenerator[list[tuple[int, OutputDelta]], None]:
        """Yield new output as soon as it is available: (index of a choice, delta), at most one per choice.

        With `whole`, all deltas of a choice after its first are merged, up to its end or an error.

        A raised error ends all choices. Closing the generator aborts choices that are still running.

        Raises:
            NotStartedError: no engine was ready in time for the submission, or the adapter is unavailable.
            NotFoundError: the adapter was unloaded before the submission.
            OverloadedError: a queue limit is reached.
            RequestError: the engine refused a prompt, or failed at it.
            EngineDeadError: an engine died after the first tokens of a running prompt, or engines crashed repeatedly.
            UnavailableError: after a death no engine was ready again in time, or the server is stopping.
        """
        await self.wait_ready()
        with self.hold_adapter(self.model) as self._adapter:
            ticket = self.admission.admit([len(prompt) for prompt in self.prompts], self.n)
            self._stream = OutputStream(None if whole else self.stream_interval)
            self.running.add(self)
            self._unfinished = dict.fromkeys(range(len(self.prompts)), self.n)
            asking = asyncio.create_task(self._submit())
            crashes = 0
            try:
                while self._unfinished:
                    try:
                        deltas = await self._stream.get()
                    except EngineDeadError as death:
                        # If none of the lost prompts has output, all are resubmitted, to another engine or after a
                        # restart. Unless a signal from outside killed the engine, a prompt may have crashed it, so the
                        # second crash ends the choices.
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
        """Wait for the complete outputs, one per choice."""
        outputs = [Output() for _ in range(len(self.prompts) * self.n)]
        async with aclosing(self.deltas(whole=True)) as deltas:
            async for step in deltas:
                for choice, delta in step:
                    output = outputs[choice]
                    output.text += delta.text
                    output.token_ids += delta.token_ids
                    output.logprobs += delta.logprobs or []
                    output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        return outputs

    def fail(self, error: Exception) -> None:
        """End all choices with `error`."""
        self._stream.fail(error)

    def usage(self, choice: int | None = None) -> Usage:
        """Return the token counts so far, of one choice or of all."""
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
        """Record a delta, and return the index of its choice."""
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
        """Submit a request for each unfinished prompt that has none. Errors are raised to the reader of the stream."""
        try:
            for prompt in self._unfinished.keys() - self._prompts_of.values():
                request_id = f"{self.id}-{self.front_end}{next(_serial)}"
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
        """Forget requests that were lost with an engine, so that late deltas are ignored; return their prompts."""
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
        """Wait until an engine is ready, and submit the lost prompts again."""
        try:
            await self.wait_ready()
        except NotStartedError as error:
            self._stream.fail(UnavailableError(error.message))  # not NotStartedError: the request was submitted before
        except Exception as error:
            self._stream.fail(error)
        else:
            await self._submit()
