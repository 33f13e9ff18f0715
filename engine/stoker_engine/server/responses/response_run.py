"""One response while it is generated: a chat run's parts → a response, complete or as events, which may be stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any

from pydantic import BaseModel

from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.server.conversation import sse
from stoker_engine.server.conversation.chat_run import AnswerDelta, ChatRun
from stoker_engine.server.errors.description import describe, log_unexpected
from stoker_engine.server.fields.logprobs import ContentLogprob, LogprobWriter
from stoker_engine.server.responses import items
from stoker_engine.server.responses.answer import Response, ResponseUsage
from stoker_engine.server.responses.events import Event
from stoker_engine.server.responses.items import Item
from stoker_engine.server.responses.request import ResponsesRequest
from stoker_engine.server.responses.shared_store import SharedResponses
from stoker_engine.server.responses.store import StoredResponse
from stoker_engine.server.responses.writer import ResponseWriter


class ResponseRun:
    """Generation of one response. Iterate `events` once, or call `whole`.

    Args:
        body: body of the request.
        history: the conversation that the request continues.
        run: generates the answer.
        model: name in the response.
        logprobs: writes logprobs; None if none are requested.
        store, owner: where and for whom the response is stored.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        history: Sequence[Item],
        run: ChatRun,
        model: str,
        logprobs: LogprobWriter | None,
        store: SharedResponses,
        owner: bytes,
    ) -> None:
        self._input = [*history, *body.items]
        self._run = run
        self._logprobs = logprobs
        self._store = store
        self._owner = owner
        self._writer = ResponseWriter(_new_response(body, run, model))
        if logprobs is not None:  # short deltas: a delta's logprobs are attached to the item of its text
            run.generation.stream_interval = 1

    async def whole(self) -> bytes:
        """Generate the response and return it as JSON."""
        async with aclosing(self._generated()) as steps:
            async for _ in steps:
                pass
        # In a thread, because long logprobs would block the event loop.
        return await asyncio.to_thread(lambda: self._writer.response.model_dump_json().encode())

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Yield the response's events. An error after the first event ends the stream with ``response.failed``."""
        has_started = False
        try:
            async with aclosing(self._generated()) as steps:
                async for events in steps:
                    has_started = True
                    yield events
        except Exception as error:
            if not has_started:
                raise
            log_unexpected(error)
            yield self._writer.fail(describe(error).message)

    def error_event(self, error: Exception) -> bytes:
        """Return the event for an error that even ``response.failed`` could not report."""
        event = self._writer.error(describe(error))
        return sse.event(event.model_dump_json().encode(), event.type)

    async def _generated(self) -> AsyncGenerator[list[Event], None]:
        """Yield each step's events. The response is stored, if at all, before its last event."""
        has_started = False
        num_tokens = 0
        async with aclosing(self._run.deltas()) as steps:
            async for step in steps:
                for _, delta in step:
                    events = [] if has_started else self._writer.begin()
                    has_started = True
                    before_answer = max(0, min(self._run.reasoning_tokens - num_tokens, len(delta.token_ids)))
                    num_tokens += len(delta.token_ids)
                    events += self._writer.add(delta.parts, self._written(delta), before_answer)
                    if delta.finish_reason is not None:
                        usage = ResponseUsage.of(self._run.generation.usage(), self._run.reasoning_tokens)
                        events += self._writer.end(delta.finish_reason, usage)
                        if self._writer.response.store:
                            await self._keep()
                        events += self._writer.last()
                    yield events

    def _written(self, delta: AnswerDelta) -> list[ContentLogprob]:
        return [] if self._logprobs is None else self._logprobs.content(delta.token_ids, delta.logprobs)

    async def _keep(self) -> None:
        response = self._writer.response
        stored = await asyncio.to_thread(self._stored, response)
        if not await self._store.put(self._owner, response.id, stored):
            response.store = False

    def _stored(self, response: Response) -> StoredResponse:
        answered = (items.of_output(item) for item in response.output)
        conversation = [items.named(item) for item in chain(self._input, answered)]
        return StoredResponse(response.model_dump_json().encode(), items.to_json(conversation), len(self._input))


def _new_response(body: ResponsesRequest, run: ChatRun, model: str) -> Response:
    """Return the initial response, which repeats fields of the request."""
    generation = run.generation
    params = generation.params[0]
    assert isinstance(params, SamplingParams)
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice
    return Response(
        id=generation.id,
        created_at=generation.created,
        model=model,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=body.top_logprobs or 0,
        text=text,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        tools=[tool.echo() for tool in body.tools or ()],
        tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )
