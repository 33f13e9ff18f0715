"""In which order waiting requests are admitted. A policy is a queue; first come, first served is this one."""

from __future__ import annotations

from collections import deque

from stoker_engine.core.request import Request


class FcfsQueue:
    """First come, first served; a preempted request came before everyone who waits."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A new request joins the end."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request returns to the front."""
        self._requests.appendleft(request)

    def peek(self) -> Request:
        """The request to admit next."""
        return self._requests[0]

    def pop(self) -> Request:
        """Takes the request to admit next."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        """Takes out a request that no longer waits."""
        self._requests.remove(request)
