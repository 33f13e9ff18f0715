"""The parts of an answer → the items of a response, and the events that tell of them.

A whole response and a streamed one are made by the same steps, so they are the same.
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

    A token's log-probabilities go to the text that comes with it or next. Those of the tokens before the answer are
    dropped, and those of calls.

    Attributes:
        response: as far as it is there; its `output` has the items that are done.
    """

    def __init__(self, response: Response) -> None:
        self.response = response
        self._sequence_numbers = itertools.count()
        self._open: OpenItem | None = None
        self._logprobs: list[ContentLogprob] = []

    def begin(self) -> list[Event]:
        """The response is started."""
        return [self._event("response.created"), self._event("response.in_progress")]

    def add(
        self, parts: Sequence[Part], logprobs: Sequence[ContentLogprob] = (), reasoning_tokens: int = 0
    ) -> list[Event]:
        """The answer continues with `parts`.

        Args:
            logprobs: of the tokens behind them.
            reasoning_tokens: how many of those are before the answer, at their beginning.
        """
        if reasoning_tokens:  # then so are all before
            self._logprobs = []
        self._logprobs += logprobs[reasoning_tokens:]
        return [event for part in parts for event in self._add(part)]

    def end(self, finish_reason: FinishReason | None, usage: ResponseUsage) -> list[Event]:
        """The answer has ended; `last` is yet to come."""
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
            events += self._add_text("")  # of the token that ended it
        events += self._close(status)
        if status == "completed" and all(isinstance(item, OutputReasoning) for item in response.output):
            events += [*self._begin(OpenMessage), *self._close(status)]  # clients look for what it said: nothing
        response.status, response.usage = status, usage
        return events

    def last(self) -> list[Event]:
        """The last event of a response that has ended."""
        return [self._event("response.incomplete" if self.response.incomplete_details else "response.completed")]

    def fail(self, message: str) -> list[Event]:
        """The answer cannot be ended. What there is of it was said."""
        events = list(self._close("incomplete"))
        self.response.status, self.response.error = "failed", ResponseError(message=message)
        return [*events, self._event("response.failed")]

    def error(self, error: ErrorDescription) -> ErrorEvent:
        """The stream cannot go on."""
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
                if not self.response.output:  # the tokens before the answer were told apart as they came
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
        """Begins an item, after the one before it."""
        yield from self._close("completed")
        self._open = new(len(self.response.output), self._number)
        yield from self._open.begin()

    def _close(self, status: Status) -> Iterator[Event]:
        """Ends the item that is being written, if one is."""
        if self._open is not None:
            yield from self._open.end(status)
            self.response.output.append(self._open.item(status))
            self._open = None

    def _number(self) -> int:
        return next(self._sequence_numbers)

    def _event(self, type: ResponseEventType) -> ResponseEvent:
        # What is sent later must not show what became of it meanwhile.
        response = self.response.model_copy(update={"output": list(self.response.output)})
        return ResponseEvent(type=type, sequence_number=self._number(), response=response)
