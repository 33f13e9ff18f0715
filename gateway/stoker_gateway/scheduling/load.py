"""What a server has to do: what it last said, what it was sent since, and what has ended since.

Work is counted in bytes of prompt text, since no tokenizer is here:

    work =  prompts sent since, less what of them was there already
         +  requests that waited when it last said × what one usually has to compute
         +  SEQUENCE_BYTES × sequences there

as data-parallel engines are weighed too, by tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

#: How many bytes of a prompt take as long as one sequence's share of the steps that a new request will see.
SEQUENCE_BYTES: Final = 256

#: For how many seconds a prompt that was sent counts as not computed yet, unless the server says so earlier.
PROMPT_S: Final = 2.0

#: For how many seconds a request that was sent counts, where the server says nothing.
SEQUENCE_S: Final = 30.0

#: Part of a KV cache from which it counts as full, where requests wait.
FULL: Final = 0.95


@dataclass(frozen=True)
class ServerLoad:
    """What a server says of itself.

    Attributes:
        running, waiting: requests in its batch, and before it.
        kv_usage: part of its KV cache in use.
        ready: whether it may be sent requests: it is neither starting nor about to end.
        counted: whether it said the numbers; else what it was sent counts for a while.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    ready: bool = True
    counted: bool = True


@dataclass
class Load:
    """What is known of one server's load. Requests are told apart by numbers, which grow.

    Attributes:
        reported: its last word.
        sent: when what was sent since was sent, by number, oldest first.
        prompts: of these, the bytes of those prompts that count as not computed yet: a number of the newest.
        prompt_bytes: of all of them.
        ended: when requests that are in its last word ended, oldest first.
    """

    reported: ServerLoad = ServerLoad()
    sent: dict[int, float] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    prompt_bytes: int = 0
    ended: deque[float] = field(default_factory=deque)

    @property
    def sequences(self) -> float:
        """Requests there."""
        return max(0.0, self.reported.running + self.reported.waiting - len(self.ended)) + len(self.sent)

    def work(self, usual: float) -> float:
        """Bytes it has to compute, or what takes as long. `usual` is how many a request has."""
        return self.prompt_bytes + self.reported.waiting * usual + SEQUENCE_BYTES * self.sequences

    def is_full(self, max_waiting: float) -> bool:
        """Whether it should get nothing now, by its own report: what was sent counts only where requests waited."""
        reported = self.reported
        return reported.waiting > 0 and (reported.kv_usage >= FULL or reported.waiting + len(self.sent) >= max_waiting)

    def send(self, number: int, size: int, now: float) -> None:
        """It is sent a request, of whose prompt it has to compute `size` bytes."""
        self.sent[number] = now
        self.prompts[number] = size
        self.prompt_bytes += size

    def end(self, number: int, now: float) -> None:
        """A request that it was given has ended."""
        if number in self.sent:
            self._drop(number)
        elif self.reported.counted and len(self.ended) < self.reported.running + self.reported.waiting:
            self.ended.append(now)

    def take_back(self, number: int) -> None:
        """A request that it was sent went elsewhere."""
        if number in self.sent:
            self._drop(number)

    def update(self, reported: ServerLoad, sent_at: float) -> None:
        """It was asked at `sent_at`, and says this: what it was sent, and what ended, before is in it."""
        self.reported = reported
        if reported.counted:
            self._forget(sent_at)
            while self.ended and self.ended[0] <= sent_at:
                self.ended.popleft()

    def pass_time(self, now: float) -> None:
        """Prompts have been computed by now, and requests have ended."""
        while self.prompts and self.sent[number := next(iter(self.prompts))] <= now - PROMPT_S:
            self.prompt_bytes -= self.prompts.pop(number)
        self._forget(now - SEQUENCE_S)

    def _forget(self, until: float) -> None:
        """Drops what was sent until then."""
        while self.sent and self.sent[number := next(iter(self.sent))] <= until:
            self._drop(number)

    def _drop(self, number: int) -> None:
        del self.sent[number]
        self.prompt_bytes -= self.prompts.pop(number, 0)
