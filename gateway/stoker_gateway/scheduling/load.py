"""Load of a server: its last report, and the requests that were sent to it or ended since.

Work is measured in bytes of prompt text, because the gateway has no tokenizer:

    work =  bytes of prompts sent since the report, without their cached prefixes
         +  waiting requests in the report × average bytes that a request has to compute
         +  SEQUENCE_BYTES × requests at the server

Stoker's server compares its data-parallel engines by the same formula, in tokens instead of bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

#: Bytes of a prompt whose prefill takes as long as one running sequence delays a new request.
SEQUENCE_BYTES: Final = 256

#: Seconds after which a sent prompt counts as computed, unless a report comes earlier.
PROMPT_S: Final = 2.0

#: Seconds for which a sent request counts if the server does not report its load.
SEQUENCE_S: Final = 30.0

#: Usage of the KV cache from which a server with waiting requests counts as full.
FULL: Final = 0.95


@dataclass(frozen=True)
class ServerLoad:
    """A server's report.

    Attributes:
        running, waiting: numbers of running and waiting requests.
        kv_usage: fraction of its KV cache in use.
        ready: whether it accepts requests: it is neither starting nor shutting down.
        counted: whether it reported these numbers; if not, requests that were sent to it count for `SEQUENCE_S`.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    ready: bool = True
    counted: bool = True


@dataclass
class Load:
    """Load of one server. Requests are identified by increasing numbers.

    Attributes:
        reported: last report.
        sent: number → time in seconds, of requests sent since the report; oldest first.
        prompts: number → bytes, of prompts sent since that count as not computed yet: the newest of `sent`.
        prompt_bytes: sum of `prompts`.
        ended: times at which requests ended that the report still includes, oldest first.
    """

    reported: ServerLoad = ServerLoad()
    sent: dict[int, float] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    prompt_bytes: int = 0
    ended: deque[float] = field(default_factory=deque)

    @property
    def sequences(self) -> float:
        """Number of requests at the server."""
        return max(0.0, self.reported.running + self.reported.waiting - len(self.ended)) + len(self.sent)

    def work(self, usual: float) -> float:
        """Return the work before the prompt of a new request, in bytes. `usual` is the average work of a request."""
        return self.prompt_bytes + self.reported.waiting * usual + SEQUENCE_BYTES * self.sequences

    def is_full(self, max_waiting: float) -> bool:
        """Whether the server should get no more requests. It is never full unless its report has waiting requests."""
        reported = self.reported
        return reported.waiting > 0 and (reported.kv_usage >= FULL or reported.waiting + len(self.sent) >= max_waiting)

    def send(self, number: int, size: int, now: float) -> None:
        """Record that a request was sent. The server has to compute `size` bytes of its prompt."""
        self.sent[number] = now
        self.prompts[number] = size
        self.prompt_bytes += size

    def end(self, number: int, now: float) -> None:
        """Record that a request at the server has ended."""
        if number in self.sent:
            self._drop(number)
        elif self.reported.counted and len(self.ended) < self.reported.running + self.reported.waiting:
            self.ended.append(now)

    def cancel(self, number: int) -> None:
        """Stop counting a request that ended at another server, if it is still counted here."""
        if number in self.sent:
            self._drop(number)

    def update(self, reported: ServerLoad, sent_at: float) -> None:
        """Adopt the report of a poll at `sent_at`, which includes requests that were sent or ended before."""
        self.reported = reported
        if reported.counted:
            self._forget(sent_at)
            while self.ended and self.ended[0] <= sent_at:
                self.ended.popleft()

    def pass_time(self, now: float) -> None:
        """Remove prompts that are older than `PROMPT_S`, and requests that are older than `SEQUENCE_S`."""
        while self.prompts and self.sent[number := next(iter(self.prompts))] <= now - PROMPT_S:
            self.prompt_bytes -= self.prompts.pop(number)
        self._forget(now - SEQUENCE_S)

    def _forget(self, until: float) -> None:
        """Drop requests that were sent until this time."""
        while self.sent and self.sent[number := next(iter(self.sent))] <= until:
            self._drop(number)

    def _drop(self, number: int) -> None:
        del self.sent[number]
        self.prompt_bytes -= self.prompts.pop(number, 0)
