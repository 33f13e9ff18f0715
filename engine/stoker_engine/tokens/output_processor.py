"""The engine's tokens → text: detokenized, cut at stop strings, logprobs with the text of their tokens.

The engine does not process text, so stop strings are found here, after the step: `process` reports a stop string, and
its caller has the engine finish the sequence. Tokens that the engine computed in the meantime are discarded.

In the server, two threads use this module. The event loop adds and forgets requests at any time; the thread that reads
the engine's pipe processes deltas. They share the table of requests, under a lock that is not held during
detokenization. Only the reading thread accesses an entry's sequences.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import Logprob, PositionLogprobs, TokenLogprobs
from stoker_engine.core.outputs import OutputDelta, TokenDelta
from stoker_engine.tokens.detokenizer import Decoding, IncrementalDetokenizer
from stoker_engine.tokens.stop import StopStrings


class TokenTexts(Decoding, Protocol):
    """The methods of a tokenizer that the processor needs."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token."""
        ...


@dataclass
class _Sequence:
    """The text state of one sequence."""

    detokenizer: IncrementalDetokenizer
    stop: StopStrings
    num_tokens: int = 0
    finished: bool = False


@dataclass
class _Request:
    """A request whose sequences are not all finished."""

    request: EngineRequest
    sequences: dict[int, _Sequence] = field(default_factory=dict)


class OutputProcessor:
    """Token deltas → output deltas. One thread calls `process`, in the order of the steps; other threads may add and
    forget requests."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()

    def add(self, request: EngineRequest) -> None:
        """Add a request before its first delta."""
        with self._lock:
            self._requests[request.id] = _Request(request)

    def forget(self, request_id: str) -> bool:
        """Drop a request. Return whether it was unfinished; unknown ids are ignored."""
        with self._lock:
            return self._requests.pop(request_id, None) is not None

    def process(self, delta: TokenDelta) -> tuple[OutputDelta | None, bool]:
        """Return the text of `delta`.

        Returns:
            (the delta to emit; None if the request is forgotten or the sequence has finished;
            whether a stop string finished the sequence before the engine did, so that the engine must finish it).
        """
        with self._lock:
            entry = self._requests.get(delta.request_id)
        if entry is None:
            return None, False
        sequence = entry.sequences.get(delta.index)
        if sequence is None:
            sequence = entry.sequences[delta.index] = self._sequence(entry.request)
        elif sequence.finished:
            return None, False
        text, stop, num_kept = self._text(sequence, entry.request, delta)
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if stop is not None:
            reason = FinishReason.STOP
        sequence.finished = reason is not None
        output = OutputDelta(
            request_id=delta.request_id,
            text=text,
            token_ids=delta.token_ids[:num_kept],
            finish_reason=reason,
            stop_reason=stop_reason if stop is None else stop,
            num_prompt_tokens=len(entry.request.prompt_token_ids),
            num_cached_tokens=delta.num_cached_tokens,
            index=delta.index,
            logprobs=None if delta.logprobs is None else [self._logprobs(p) for p in delta.logprobs[:num_kept]],
            prompt_logprobs=self._prompt_logprobs(delta),
            cumulative_logprob=delta.cumulative_logprob,
            error=delta.error,
        )
        if (
            sequence.finished
            and len(entry.sequences) == entry.request.num_sequences
            and all(each.finished for each in entry.sequences.values())
        ):
            self._done(entry)
        return output, stop is not None and delta.finish_reason is None

    def _done(self, entry: _Request) -> None:
        """Drop an entry, unless the event loop has meanwhile forgotten it or added another one with its id."""
        with self._lock:
            if self._requests.get(entry.request.id) is entry:
                del self._requests[entry.request.id]

    def _sequence(self, request: EngineRequest) -> _Sequence:
        params = request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, request.prompt_token_ids, params.skip_special_tokens, params.visible_special_tokens
        )
        return _Sequence(detokenizer, StopStrings(params.stop, params.include_stop_str_in_output))

    def _text(self, sequence: _Sequence, request: EngineRequest, delta: TokenDelta) -> tuple[str, str | None, int]:
        """Return (the text to emit, the stop string that finished it or None, the number of tokens to keep)."""
        params = request.params
        min_tokens, includes_stop = params.min_tokens, params.include_stop_str_in_output
        # The token that ends the output is not part of the text, unless include_stop_str_in_output is set.
        silent = len(delta.token_ids) - 1 if delta.finish_reason is FinishReason.STOP and not includes_stop else None
        emitted = ""
        for position, token_id in enumerate(delta.token_ids):
            sequence.num_tokens += 1
            if position == silent:
                break
            watch = sequence.num_tokens > min_tokens
            text, stop = sequence.stop.add(sequence.detokenizer.add(token_id), watch)
            emitted += text
            if stop is not None:
                return emitted, stop, position + 1
        if delta.finish_reason is not None:
            text, stop = sequence.stop.add(sequence.detokenizer.flush(), sequence.num_tokens > min_tokens)
            emitted += text
            if stop is not None:
                return emitted, stop, len(delta.token_ids)
            emitted += sequence.stop.flush()
        return emitted, None, len(delta.token_ids)

    def _logprobs(self, position: TokenLogprobs) -> PositionLogprobs:
        chosen, *likeliest = zip(position.token_ids, position.logprobs, strict=True)
        entries = {chosen[0]: self._logprob(*chosen, position.rank)}
        for rank, (token_id, logprob) in enumerate(likeliest, start=1):
            if token_id not in entries:
                entries[token_id] = self._logprob(token_id, logprob, rank)
        return entries

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._tokenizer.token_text(token_id))

    def _prompt_logprobs(self, delta: TokenDelta) -> list[PositionLogprobs | None] | None:
        if delta.prompt_logprobs is None:
            return None
        return [None, *map(self._logprobs, delta.prompt_logprobs)]
