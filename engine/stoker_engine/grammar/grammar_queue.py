"""Requests whose grammars are still being compiled: they wait outside the scheduler, and hold up nobody."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Final

from stoker_common.errors import EngineDeadError
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import TokenDelta

logger = logging.getLogger(__name__)

#: Seconds that are waited for grammars where there is nothing else to do; requests and aborts may come meanwhile.
_WAIT_S: Final = 0.01


class GrammarQueue:
    """The requests, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[EngineRequest, Future[object]]] = {}
        self._num_reported = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_news(self) -> bool:
        """Whether there are more or fewer than when somebody was told."""
        return len(self) != self._num_reported

    @property
    def has_work(self) -> bool:
        """Whether there is something to wait for, or to tell."""
        return len(self) > 0 or self.has_news

    def reported(self) -> int:
        """How many there are, for somebody who is told."""
        self._num_reported = len(self)
        return self._num_reported

    def add(self, request: EngineRequest, ready: Future[object]) -> None:
        """Takes in a request that waits for `ready`."""
        self._requests[request.id] = request, ready

    def abort(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        if (known := self._requests.pop(request_id, None)) is not None:
            known[1].cancel()

    def uses(self, adapter: int) -> bool:
        """Whether there is a request with this adapter."""
        return any(request.adapter == adapter for request, _ in self._requests.values())

    def wait(self) -> None:
        """Waits for the first, a moment at most."""
        wait([ready for _, ready in self._requests.values()], _WAIT_S, FIRST_COMPLETED)

    def pop_ready(self) -> tuple[list[EngineRequest], list[TokenDelta]]:
        """Those that are ready, and the ends of those whose grammars cannot be compiled.

        Raises:
            EngineDeadError: whoever compiles them has died.
        """
        done = [(request, ready) for request, ready in self._requests.values() if ready.done()]
        requests: list[EngineRequest] = []
        failed: list[TokenDelta] = []
        for request, ready in done:
            del self._requests[request.id]
            if (error := ready.exception()) is None:
                assert request.grammar is not None
                grammar = replace(request.grammar, compiled=ready.result())
                requests.append(replace(request, grammar=grammar))
                continue
            if isinstance(error, EngineDeadError):
                raise error
            logger.error("request %s: %s", request.id, error, extra=request.log_fields)
            failed += [
                TokenDelta(request.id, index, [], FinishReason.ERROR, error=str(error))
                for index in range(request.num_sequences)
            ]
        return requests, failed
