"""/v1/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.generation import Generation, Output
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.sse import EventStream
from stoker_engine.server.conversation.text_events import EncodedEvent, TextEvents
from stoker_engine.server.engine.engine_client import PromptTokenizer
from stoker_engine.server.fields.logprobs import LogprobWriter
from stoker_engine.server.middleware.request_id import HEADER, request_id
from stoker_engine.server.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from stoker_engine.server.openai.events import FRAMING, include_usage
from stoker_engine.server.openai.logprobs import completion_logprobs, logprob_writer, prompt_logprobs
from stoker_engine.server.openai.response_models import Completion, CompletionChoice, Usage
from stoker_engine.tokens.prompt_tokens import PromptTokens, prompt_tokens


def routes(service: Service) -> APIRouter:
    """Return the endpoint; `service` handles its requests."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""
        await service.wait_ready()
        model = service.check(body.model, body.priority)
        client = service.client
        encoded = await until_disconnect(request.receive, _tokenize(body, service))
        info = client.info
        prompts = [
            prompt_tokens(each, body.truncate_prompt_tokens, body.max_tokens, info, body.truncation_side or "left")
            for each in encoded
        ]
        # Prompts that leave equal room share their parameters.
        params_for = functools.cache(partial(body.params_for, info.sampling_defaults))
        params = [params_for(min(DEFAULT_MAX_TOKENS, info.max_model_len - len(prompt))) for prompt in prompts]
        base_id = request_id(request, body.request_id)
        generation = service.generation(
            f"cmpl-{base_id}",
            model,
            prompts,
            params,
            n=body.num_sequences,
            priority=body.priority,
            cache_salt=body.cache_salt,
            stream_interval=body.stream_interval,
            field_names=body.format_names,
            report_output=not body.only_echo,
        )
        echo = await until_disconnect(request.receive, _echo(body, prompts, client.tokenizer)) if body.echo else None
        logprobs = logprob_writer(service, body.logprobs, body.return_tokens_as_token_ids)
        writer = _Writer(body, generation, model, echo, logprobs)
        headers = {HEADER: base_id}
        if body.stream:
            return EventStream(writer.events(include_usage(service, body)), headers, generation.usage, FRAMING)
        completion = await until_disconnect(request.receive, writer.whole())
        return Response(completion.model_dump_json(), headers=headers, media_type="application/json")

    return router


async def _tokenize(body: CompletionRequest, service: Service) -> list[list[int]]:
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if body.truncate_prompt_tokens is None:
        for text in texts:
            service.check_length(text)
    encoded = await service.client.tokenizer.encode(texts, body.add_special_tokens is not False) if texts else []
    of_text = iter(encoded)
    return [next(of_text) if isinstance(prompt, str) else prompt for prompt in body.prompts]


async def _echo(body: CompletionRequest, prompts: Sequence[PromptTokens], tokenizer: PromptTokenizer) -> list[str]:
    """Return the prompts' texts: as sent, or decoded if sent as tokens or with `truncate_prompt_tokens`."""
    return [
        prompt_text
        if isinstance(prompt_text, str) and body.truncate_prompt_tokens is None
        else await tokenizer.decode(prompt, skip_special_tokens=False)
        for prompt_text, prompt in zip(body.prompts, prompts, strict=True)
    ]


@dataclass
class _Writer:
    """Writes an answer as one body or as events.

    Attributes:
        echo: texts of the prompts, with which the choices begin; None without `echo`.
    """

    body: CompletionRequest
    generation: Generation
    model: str
    echo: Sequence[str] | None
    logprobs: LogprobWriter | None
    _offsets: dict[int, int] = field(default_factory=dict)
    _texts: dict[int, TextEvents] = field(default_factory=dict)  # by choice

    async def whole(self) -> Completion:
        """Generate and return the complete answer."""
        outputs = await self.generation.collect()
        # In a thread, because long logprobs would block the event loop.
        return await asyncio.to_thread(self._completion, outputs)

    def _completion(self, outputs: Sequence[Output]) -> Completion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        if self.body.prompt_logprobs is not None:
            for index, choice in enumerate(choices):
                choice.prompt_logprobs = prompt_logprobs(self.generation.prompt_logprobs[index // self.generation.n])
        return self._event(choices=choices, usage=Usage.of(self.generation.usage()))

    async def events(self, include_usage: bool) -> AsyncGenerator[list[Completion | EncodedEvent], None]:
        """Yield lists of events while the answer is generated."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for step in deltas:
                yield [event for index, delta in step for event in self._events(index, delta)]
        if include_usage:
            yield [self._event(choices=[], usage=Usage.of(self.generation.usage()))]

    def _events(self, index: int, delta: OutputDelta) -> Iterator[Completion | EncodedEvent]:
        """Yield the event of a delta, if there is anything to send."""
        body, begins = self.body, index not in self._offsets
        if body.only_echo and not begins:
            return
        is_more_than_text = delta.finish_reason or body.return_token_ids or body.continuous_usage
        if not (begins or is_more_than_text or self.logprobs is not None):
            yield self._text_event(index, delta.text)
            return
        output = Output(delta.text, delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason)
        usage = Usage.of(self.generation.usage(index)) if self.body.continuous_usage else None
        yield self._event(choices=[self._choice(index, output)], usage=usage)

    def _text_event(self, index: int, text: str) -> EncodedEvent:
        """Return the event that only adds text to a choice."""
        if index not in self._texts:
            self._texts[index] = TextEvents(
                lambda text: self._event(choices=[CompletionChoice(index=index, text=text)])
            )
        return self._texts[index].encoded(text)

    @property
    def _event(self) -> partial[Completion]:
        generation = self.generation
        return partial(Completion, id=generation.id, created=generation.created, model=self.model)

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        """Return what `output` adds to choice `index`, preceded by the prompt if it is echoed and not yet written."""
        begins = index not in self._offsets
        self._offsets.setdefault(index, 0)
        prompt = index // self.generation.n
        prompt_ids = self.generation.prompts[prompt]
        text, token_ids = output.text, output.token_ids
        positions: list[PositionLogprobs | None] = [*output.logprobs]
        if self.body.only_echo:
            text, token_ids, positions = "", [], []
        choice = CompletionChoice(
            index=index,
            text=text,
            finish_reason=FinishReason.LENGTH if self.body.only_echo else output.finish_reason,
            stop_reason=None if self.body.only_echo else output.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = token_ids
            choice.prompt_token_ids = prompt_ids if begins else None
        if self.echo is not None and begins:
            choice.text = self.echo[prompt] + text
            token_ids = prompt_ids + token_ids
            if self.logprobs is not None:
                positions = [*self.generation.prompt_logprobs[prompt], *positions]
        if self.logprobs is not None:
            choice.logprobs, self._offsets[index] = completion_logprobs(
                self.logprobs, token_ids, positions, self._offsets[index]
            )
        return choice
