"""Load of a server: its last report, and the requests that were sent to it or ended since.

Work is measured in bytes of prompt text, because the gateway has no tokenizer:

    work =  bytes of sent prompts that count as not computed yet, without cached prefixes
         +  waiting requests in the report × average bytes that a request has to compute
         +  SEQUENCE_BYTES × requests at the server

Stoker's server compares its data-parallel engines by a similar formula in tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

#: Assumed delay that each request at the server causes to a new request, in bytes of prefill.
SEQUENCE_BYTES: Final = 256

#: Maximum time for which a sent prompt counts as not computed, in seconds.
PROMPT_S: Final = 2.0

#: Maximum time for which a sent request counts without a report that includes it, in seconds.
SEQUENCE_S: Final = 30.0

#: Used fraction of the KV cache from which a server with waiting requests counts as full.
FULL: Final = 0.95


@dataclass(frozen=True)
class ServerLoad:
    """A server's report.

    Attributes:
        running, waiting: numbers of running and waiting requests.
        kv_usage: fraction of its KV cache in use.
        ready: whether it accepts requests; it does not while it starts or shuts down, for example.
        counted: whether it reported its load; if not, requests sent to it count until they end, at most `SEQUENCE_S`.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    ready: bool = True
    counted: bool = True


@dataclass
class Load:
    """Load of one server. Requests are identified by the numbers of their picks.

    Attributes:
        reported: last report.
        sent: number → time in seconds, of sent requests that the report does not include; oldest first.
        prompts: number → bytes to compute, of the prompts in `sent` that count as not computed yet.
        prompt_bytes: sum of `prompts`.
        ended: end times of requests that the report still includes, oldest first.
    """

    reported: ServerLoad = ServerLoad()
    sent: dict[int, float] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    prompt_bytes: int = 0
    ended: deque[float] = field(default_factory=deque)

    @property
    def sequences(self) -> float:
        """Estimated number of requests at the server."""
        return max(0.0, self.reported.running + self.reported.waiting - len(self.ended)) + len(self.sent)

    def work(self, usual: float) -> float:
        """Return the work before the prompt of a new request, in bytes. A request has to compute `usual` on average."""
        return self.prompt_bytes + self.reported.waiting * usual + SEQUENCE_BYTES * self.sequences

    def is_full(self, max_waiting: float) -> bool:
        """Whether the server should get no more requests. It is never full unless its report has waiting requests."""
        reported = self.reported
        return reported.waiting > 0 and (reported.kv_usage >= FULL or reported.waiting + len(self.sent) >= max_waiting)

    def send(self, number: int, size: int, now: float) -> None:
        """Record that a request was sent, with `size` bytes of prompt to compute."""
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
        """Remove a request from `sent`, if it is there."""
        if number in self.sent:
            self._drop(number)

    def update(self, reported: ServerLoad, sent_at: float) -> None:
        """Adopt the report of a poll that began at `sent_at`. A `counted` report includes earlier sends and ends."""
        self.reported = reported
        if reported.counted:
            self._forget(sent_at)
            while self.ended and self.ended[0] <= sent_at:
                self.ended.popleft()

    def pass_time(self, now: float) -> None:
        """Remove prompts from `prompts` after `PROMPT_S`, and requests from `sent` after `SEQUENCE_S`."""
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
