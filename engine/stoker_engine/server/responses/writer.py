"""Parts of an answer → items of a response and their events.

Complete and streamed responses take the same steps, so they are equal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.errors.description import ErrorDescription
from stoker_engine.server.fields.logprobs import ContentLogprob
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from stoker_engine.server.responses.answer import (
    IncompleteDetails,
    OutputReasoning,
    Response,
    ResponseError,
    ResponseUsage,
)
from stoker_engine.server.responses.events import ErrorEvent, Event, ResponseEvent, ResponseEventType
from stoker_engine.server.responses.items import Status
from stoker_engine.server.responses.open_item import OpenCall, OpenItem, OpenMessage, OpenReasoning


class ResponseWriter:
    """Writes one response.

    Logprobs of tokens are attached to the text that is emitted with or after them. Those of reasoning and calls are
    dropped.

    Attributes:
        response: the response so far; its `output` contains the finished items.
    """

    def __init__(self, response: Response) -> None:
        self.response = response
        self._sequence_numbers = itertools.count()
        self._open: OpenItem | None = None
        self._logprobs: list[ContentLogprob] = []

    def begin(self) -> list[Event]:
        """Start the response."""
        return [self._event("response.created"), self._event("response.in_progress")]

    def add(
        self, parts: Sequence[Part], logprobs: Sequence[ContentLogprob] = (), reasoning_tokens: int = 0
    ) -> list[Event]:
        """Continue the answer with `parts`.

        Args:
            logprobs: logprobs of the new tokens.
            reasoning_tokens: how many of these tokens, from the first on, are reasoning.
        """
        if reasoning_tokens:  # all earlier tokens are reasoning, too
            self._logprobs = []
        self._logprobs += logprobs[reasoning_tokens:]
        return [event for part in parts for event in self._add(part)]

    def end(self, finish_reason: FinishReason | None, usage: ResponseUsage) -> list[Event]:
        """End the answer; `last` must follow."""
        response = self.response
        status: Literal["completed", "incomplete"] = "completed"
        if finish_reason is FinishReason.LENGTH:
            status, response.incomplete_details = "incomplete", IncompleteDetails()
        elif isinstance(self._open, OpenCall) and not self._open.is_whole:  # a stop string cut it off
            status, response.incomplete_details = "incomplete", IncompleteDetails(reason=None)
        else:
            response.completed_at = int(time.time())
        events: list[Event] = []
        if isinstance(self._open, OpenMessage) and self._logprobs:
            events += self._add_text("")  # carries the logprobs of tokens after its text
        events += self._close(status)
        if status == "completed" and all(isinstance(item, OutputReasoning) for item in response.output):
            events += [*self._begin(OpenMessage), *self._close(status)]  # clients expect a message, even if empty
        response.status, response.usage = status, usage
        return events

    def last(self) -> list[Event]:
        """Return the last event of a response that has ended."""
        return [self._event("response.incomplete" if self.response.incomplete_details else "response.completed")]

    def fail(self, message: str) -> list[Event]:
        """End the response with an error; its content so far stays."""
        events = list(self._close("incomplete"))
        self.response.status, self.response.error = "failed", ResponseError(message=message)
        return [*events, self._event("response.failed")]

    def error(self, error: ErrorDescription) -> ErrorEvent:
        """Return the event for an error that ends the stream."""
        return ErrorEvent(sequence_number=self._number(), code=error.code, message=error.message, param=error.param)

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Content(text):
                yield from self._add_text(text)
                return
            case Reasoning(text):
                if not isinstance(self._open, OpenReasoning):
                    yield from self._begin(OpenReasoning)
                assert self._open is not None
                yield from self._open.add(text)
                if not self.response.output:  # keep logprobs: reasoning tokens were already excluded
                    return
            case ToolCallStart(name, call_id):
                yield from self._begin(partial(OpenCall, name=name, call_id=call_id))
            case ToolCallArguments(text):
                assert self._open is not None
                yield from self._open.add(text)
        self._logprobs = []

    def _add_text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, OpenMessage):
            yield from self._begin(OpenMessage)
        assert isinstance(self._open, OpenMessage)
        logprobs, self._logprobs = self._logprobs, []
        yield from self._open.add(text, logprobs)

    def _begin(self, new: Callable[[int, Callable[[], int]], OpenItem]) -> Iterator[Event]:
        """Start an item, after closing the previous one."""
        yield from self._close("completed")
        self._open = new(len(self.response.output), self._number)
        yield from self._open.begin()

    def _close(self, status: Status) -> Iterator[Event]:
        """End the item that is being written, if any."""
        if self._open is not None:
            yield from self._open.end(status)
            self.response.output.append(self._open.item(status))
            self._open = None

    def _number(self) -> int:
        return next(self._sequence_numbers)

    def _event(self, type: ResponseEventType) -> ResponseEvent:
        # A copy, because the event must not show changes that are made before it is sent.
        response = self.response.model_copy(update={"output": list(self.response.output)})
        return ResponseEvent(type=type, sequence_number=self._number(), response=response)
