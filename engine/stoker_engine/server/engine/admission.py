"""Backpressure: requests are refused by vLLM's two limits, before they queue.

limit                     counts
max_num_queued_reqs       sequences in flight, waiting or running; a request with n > 1 counts n times for each prompt
max_num_queued_tokens     tokens of prompts that wait for their first output token. A request is admitted while the
                          sum is below the limit, so that a prompt longer than the limit can be served alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker_common.errors import OverloadedError


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
    """

    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    on_rejected: Callable[[str], None]
    num_sequences: int = 0
    num_waiting_tokens: int = 0

    def admit(self, prompt_lengths: Sequence[int], n: int) -> Ticket:
        """Admit a request and count it as in flight until `release`.

        Raises:
            OverloadedError: the request would exceed `max_num_queued_reqs`, or `max_num_queued_tokens` is reached.
        """
        num_requested = len(prompt_lengths) * n
        if self.max_num_queued_reqs is not None and self.num_sequences + num_requested > self.max_num_queued_reqs:
            self.on_rejected("max_num_queued_reqs")
            raise OverloadedError(
                f"too many requests: {self.num_sequences} sequences are in flight, this request adds {num_requested}, "
                f"and the limit is {self.max_num_queued_reqs} (--max-num-queued-reqs); retry later"
            )
        if self.max_num_queued_tokens is not None and self.num_waiting_tokens >= self.max_num_queued_tokens:
            self.on_rejected("max_num_queued_tokens")
            raise OverloadedError(
                f"too many requests: {self.num_waiting_tokens} prompt tokens are waiting, "
                f"and the limit is {self.max_num_queued_tokens} (--max-num-queued-tokens); retry later"
            )
        ticket = Ticket(num_requested, dict(enumerate(prompt_lengths)))
        self.num_sequences += num_requested
        self.num_waiting_tokens += sum(prompt_lengths)
        return ticket

    def on_first_token(self, ticket: Ticket, prompt: int) -> None:
        """Record the first output token of a prompt; later calls for the same prompt do nothing."""
        self.num_waiting_tokens -= ticket.waiting.pop(prompt, 0)

    def release(self, ticket: Ticket) -> None:
        """Record the end of an admitted request."""
        self.num_sequences -= ticket.num_sequences
        self.num_waiting_tokens -= sum(ticket.waiting.values())
        ticket.num_sequences, ticket.waiting = 0, {}
