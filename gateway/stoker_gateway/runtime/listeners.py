"""Callbacks for poll results and completed requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from stoker_gateway.limits.limiter import Limiter
from stoker_gateway.polling.poller import PollResult
from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.scheduling.picker import EndpointPicker
from stoker_gateway.usage.completed_request import CompletedRequest


def listener(
    model_registry: ModelRegistry, pickers: Mapping[str, EndpointPicker], wake: Callable[[str], None]
) -> Callable[[PollResult], None]:
    """Return a callback that passes a server's poll results to the pickers of its endpoints.

    Args:
        pickers: pickers by served name.
        wake: called with the served name of each endpoint whose servers may have room now.
    """
    names_of: dict[str, list[str]] = {}
    for name, endpoint in model_registry.endpoints.items():
        for server in endpoint.servers:
            names_of.setdefault(server, []).append(name)

    def on_result(result: PollResult) -> None:
        for name in names_of.get(result.server, ()):
            if result.load is None:
                pickers[name].failed(result.server, time.monotonic())
            else:
                pickers[name].observe(result.server, result.load, result.sent_at, time.monotonic())
            wake(name)

    return on_result


def ended_listener(
    pickers: Mapping[str, EndpointPicker], wake: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[CompletedRequest], None]:
    """Return a callback that reports completed requests, and servers that did not answer them, to the pickers.

    Args:
        pickers: pickers by served name.
        wake: called with the served name of each endpoint whose servers may have room now.
        clock: the pickers' clock, in seconds.
    """

    def on_completed(ended: CompletedRequest) -> None:
        picker = pickers.get(ended.model)
        if picker is None:
            return
        now = clock()
        picker.ended(ended.pick, ended.servers, now)
        for server in ended.servers if ended.unreachable else set(ended.servers[:-1]) - set(ended.servers[-1:]):
            picker.failed(server, now - ended.duration_s)
        wake(ended.model)

    return on_completed


def answered_listener(answered: Callable[[str, int, str], None]) -> Callable[[CompletedRequest], None]:
    """Return a callback that reports, for each request with a response, the last server to which it was sent.

    Args:
        answered: called with the model's served name, the number of the pick, and the server.
    """

    def on_completed(ended: CompletedRequest) -> None:
        if ended.servers and ended.status:
            answered(ended.model, ended.pick, ended.servers[-1])

    return on_completed


def in_flight_listener(has_ended: Callable[[str, int], None]) -> Callable[[CompletedRequest], None]:
    """Return a callback that reports the end of a request.

    Args:
        has_ended: called with the model's served name and the number of the pick.
    """

    def on_completed(ended: CompletedRequest) -> None:
        has_ended(ended.model, ended.pick)

    return on_completed


def settler(limiter: Limiter, clock: Callable[[], float] = time.monotonic) -> Callable[[CompletedRequest], None]:
    """Return a callback that replaces the reserved tokens of a request by its used tokens."""

    def on_completed(ended: CompletedRequest) -> None:
        if ended.grant:
            limiter.settle(ended.grant, ended.tokens.prompt + ended.tokens.output, clock())

    return on_completed
