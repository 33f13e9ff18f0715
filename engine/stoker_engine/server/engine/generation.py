"""Prompts → deltas: one request to the engine for each prompt, all running side by side."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from stoker_engine.contract.errors import EngineDeadError, EngineKilledError, RequestError, RequestFailedError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.server.engine.admission import Admission
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.openai.responses import PromptTokensDetails, Usage


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

    Choice ``prompt × n + i`` is the i-th sequence of a prompt.

    Attributes:
        wait_ready: waits while an engine that died, since the prompts were tokenized or since it got them, is loaded
            again.
        id: of the answer; the engine's requests are named after it.
        running: where it is to be found while it runs.
        field_names: what the client calls the engine's fields, for errors, where that is something else.
        tell_cached: whether usage tells the prompt tokens that a prefix hit saved.
        tell_output: whether what is generated is told; else only the prompt is, and usage counts only that.
        created: when, in Unix seconds.
        prompt_logprobs: of each prompt, once its first delta has come, when asked for.
    """

    client: EngineClient
    wait_ready: Callable[[], Awaitable[None]]
    admission: Admission
    running: set[Generation]
    id: str
    prompts: Sequence[list[int]]
    params: Sequence[RequestParams]
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict)
    tell_cached: bool = True
    tell_output: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)
    _completion_tokens: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)
    _merged: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = field(default_factory=asyncio.Queue)

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yields (index of a choice, delta), in the order the engine makes them.

        The first error ends all of them. Closing the generator aborts all that still run.

        Raises:
            UnavailableError: the engine died meanwhile, and another one is not there in time; raised first.
            OverloadedError: a queue's limit is reached; raised first.
            RequestError: what the engine raised.
        """
        await self.wait_ready()
        ticket = self.admission.admit([len(prompt) for prompt in self.prompts], self.n)
        self.running.add(self)
        pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self.prompts))]
        pending = len(pumps)
        try:
            while pending:
                prompt, item = await self._merged.get()
                if isinstance(item, Exception):
                    with renamed(self.field_names):
                        raise item
                if item is None:
                    pending -= 1
                    continue
                self.admission.on_first_token(ticket, prompt)
                choice = prompt * self.n + item.index
                self._completion_tokens[choice] = self._completion_tokens.get(choice, 0) + len(item.token_ids)
                self._cached_tokens[prompt] = item.num_cached_tokens
                if item.prompt_logprobs is not None:
                    self.prompt_logprobs[prompt] = item.prompt_logprobs
                yield choice, item
        finally:
            self.admission.release(ticket)
            self.running.discard(self)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def collect(self) -> list[Output]:
        """Waits for everything; one output a choice."""
        outputs = [Output() for _ in range(len(self.prompts) * self.n)]
        async with aclosing(self.deltas()) as deltas:
            async for choice, delta in deltas:
                output = outputs[choice]
                output.text += delta.text
                output.token_ids += delta.token_ids
                output.logprobs += delta.logprobs or []
                output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        return outputs

    def fail(self, error: Exception) -> None:
        """Ends everything with `error`."""
        self._merged.put_nowait((0, error))

    def usage(self, choice: int | None = None) -> Usage:
        """The tokens so far, of one choice or over all."""
        if choice is None:
            prompts = range(len(self.prompts))
            completion_tokens = sum(self._completion_tokens.values()) if self.tell_output else 0
        else:
            prompts = range(choice // self.n, choice // self.n + 1)
            completion_tokens = self._completion_tokens.get(choice, 0) if self.tell_output else 0
        prompt_tokens = sum(len(self.prompts[prompt]) for prompt in prompts)
        cached = sum(self._cached_tokens.get(prompt, 0) for prompt in prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached) if self.tell_cached else None,
        )

    async def _pump(self, prompt: int) -> None:
        """Moves one prompt's deltas into `_merged`; None, or an error, is the last thing it puts there.

        A prompt whose engine dies before its first delta goes to the next engine: nobody has seen anything of it yet.
        If it was no signal from outside, this prompt may be what the engine dies of, and goes on only once.
        """
        begun, crashes = False, 0
        try:
            while True:
                try:
                    async with aclosing(self._stream(prompt)) as deltas:
                        async for delta in deltas:
                            if delta.finish_reason is FinishReason.ERROR:
                                raise RequestFailedError(delta.error)
                            begun = True
                            self._merged.put_nowait((prompt, delta))
                    break
                except EngineDeadError as death:
                    crashes += not isinstance(death, EngineKilledError)
                    if begun or crashes > 1:
                        raise
                await self.wait_ready()
            self._merged.put_nowait((prompt, None))
        except Exception as error:  # raised again where the answer is made
            self._merged.put_nowait((prompt, error))

    def _stream(self, prompt: int) -> AsyncGenerator[OutputDelta, None]:
        return self.client.generate(
            f"{self.id}-{next(_serial)}",
            self.prompts[prompt],
            self.params[prompt],
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
