"""Backpressure: requests are refused by vLLM's two limits, before they queue.

limit                     counts
max_num_queued_reqs       sequences in flight, waiting or running; a request with n > 1 counts n times for each prompt
max_num_queued_tokens     tokens of prompts that wait for their first output token. A request is admitted while the
                          sum is below the limit, so that a prompt longer than the limit can be served alone

Several front ends count together. If they admit requests at the same moment, each may exceed a limit by one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker_common.errors import OverloadedError
from stoker_engine.server.engine.peers import Peers


@dataclass
class Ticket:
    """One admitted HTTP request.

    Attributes:
        waiting: index of a prompt in the request → its number of tokens, until its first output token.
    """

    num_sequences: int
    waiting: dict[int, int]


@dataclass
class Admission:
    """Counters of requests in flight. Used from the event loop only, so that check and admission are atomic.

    Attributes:
        on_rejected: called with the limit's name when a request is rejected.
        peers: the other front ends of the server, if it has several; their requests count, too.
        num_requests, num_sequences, num_waiting_tokens: counts of this process.
    """

    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    on_rejected: Callable[[str], None]
    peers: Peers | None = None
    num_requests: int = 0
    num_sequences: int = 0
    num_waiting_tokens: int = 0

    def admit(self, prompt_lengths: Sequence[int], n: int) -> Ticket:
        """Admit a request and count it as in flight until `release`.

        Raises:
            OverloadedError: the request would exceed `max_num_queued_reqs`, or `max_num_queued_tokens` is reached.
        """
        num_requested = len(prompt_lengths) * n
        sequences, waiting_tokens = self.num_sequences, self.num_waiting_tokens
        if self.peers is not None:
            _, others, others_waiting = self.peers.counts.total(but=self.peers.index)
            sequences, waiting_tokens = sequences + others, waiting_tokens + others_waiting
        if self.max_num_queued_reqs is not None and sequences + num_requested > self.max_num_queued_reqs:
            self.on_rejected("max_num_queued_reqs")
            raise OverloadedError(
                f"too many requests: {sequences} sequences are in flight, this request adds {num_requested}, "
                f"and the limit is {self.max_num_queued_reqs} (--max-num-queued-reqs); retry later"
            )
        if self.max_num_queued_tokens is not None and waiting_tokens >= self.max_num_queued_tokens:
            self.on_rejected("max_num_queued_tokens")
            raise OverloadedError(
                f"too many requests: {waiting_tokens} prompt tokens are waiting, "
                f"and the limit is {self.max_num_queued_tokens} (--max-num-queued-tokens); retry later"
            )
        ticket = Ticket(num_requested, dict(enumerate(prompt_lengths)))
        self.num_requests += 1
        self.num_sequences += num_requested
        self.num_waiting_tokens += sum(prompt_lengths)
        self._show()
        return ticket

    def on_first_token(self, ticket: Ticket, prompt: int) -> None:
        """Record the first output token of a prompt; later calls for the same prompt do nothing."""
        self.num_waiting_tokens -= ticket.waiting.pop(prompt, 0)
        self._show()

    def release(self, ticket: Ticket) -> None:
        """Record the end of an admitted request; later calls do nothing."""
        self.num_requests -= ticket.num_sequences > 0
        self.num_sequences -= ticket.num_sequences
        self.num_waiting_tokens -= sum(ticket.waiting.values())
        ticket.num_sequences, ticket.waiting = 0, {}
        self._show()

    def _show(self) -> None:
        """Show the counts to the other front ends."""
        if self.peers is not None:
            self.peers.counts.show(self.peers.index, self.num_requests, self.num_sequences, self.num_waiting_tokens)
