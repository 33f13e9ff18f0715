"""Requests whose grammars are being compiled. They wait outside the scheduler, without delaying other requests."""

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

#: Maximum seconds to wait for grammars while the engine is idle; requests and aborts may arrive meanwhile.
_WAIT_S: Final = 0.01


class GrammarQueue:
    """The waiting requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[EngineRequest, Future[object]]] = {}
        self._num_reported = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_news(self) -> bool:
        """Whether the number of requests differs from the last reported one."""
        return len(self) != self._num_reported

    @property
    def has_work(self) -> bool:
        """Whether a request waits, or the number of requests must be reported."""
        return len(self) > 0 or self.has_news

    def reported(self) -> int:
        """Return the number of requests, and record it as reported."""
        self._num_reported = len(self)
        return self._num_reported

    def add(self, request: EngineRequest, ready: Future[object]) -> None:
        """Add a request that waits for `ready`."""
        self._requests[request.id] = request, ready

    def abort(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        if (known := self._requests.pop(request_id, None)) is not None:
            known[1].cancel()

    def uses(self, adapter: int) -> bool:
        """Whether a waiting request uses this adapter."""
        return any(request.adapter == adapter for request, _ in self._requests.values())

    def wait(self) -> None:
        """Wait until the compilation of a grammar ends, at most `_WAIT_S`."""
        wait([ready for _, ready in self._requests.values()], _WAIT_S, FIRST_COMPLETED)

    def pop_ready(self) -> tuple[list[EngineRequest], list[TokenDelta]]:
        """Remove and return the requests that are ready, and final deltas of those whose grammars cannot be compiled.

        Raises:
            EngineDeadError: the process that compiles grammars has died.
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
