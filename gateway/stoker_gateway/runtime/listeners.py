"""What pickers are told: by servers, who answer the poller, and by Envoy, whose requests have ended."""

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
    """What takes a server's answers to the endpoints that have it, and to no others.

    Args:
        pickers: by served name.
        wake: told the served name of each that may have room now.
    """
    names_of: dict[str, list[str]] = {}
    for name, endpoint in model_registry.endpoints.items():
        for server in endpoint.servers:
            names_of.setdefault(server, []).append(name)

    def hear(heard: PollResult) -> None:
        for name in names_of.get(heard.server, ()):
            if heard.load is None:
                pickers[name].failed(heard.server, time.monotonic())
            else:
                pickers[name].observe(heard.server, heard.load, heard.sent_at, time.monotonic())
            wake(name)

    return hear


def ended_listener(
    pickers: Mapping[str, EndpointPicker], wake: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[CompletedRequest], None]:
    """What counts requests out that have ended, and tells of servers that could not be reached.

    Args:
        pickers: by served name.
        wake: told the served name of each that may have room now.
        clock: the pickers', in seconds.
    """

    def hear(ended: CompletedRequest) -> None:
        picker = pickers.get(ended.model)
        if picker is None:
            return
        now = clock()
        picker.ended(ended.pick, ended.servers, now)
        for server in ended.servers if ended.unreachable else set(ended.servers[:-1]) - set(ended.servers[-1:]):
            picker.failed(server, now - ended.duration_s)
        wake(ended.model)

    return hear


def answered_listener(answered: Callable[[str, int, str], None]) -> Callable[[CompletedRequest], None]:
    """What tells which server answered a request.

    Args:
        answered: told the model's served name, the number of the pick, and the server.
    """

    def hear(ended: CompletedRequest) -> None:
        if ended.servers and ended.status:
            answered(ended.model, ended.pick, ended.servers[-1])

    return hear


def in_flight_listener(has_ended: Callable[[str, int], None]) -> Callable[[CompletedRequest], None]:
    """What tells which request has ended.

    Args:
        has_ended: told the model's served name, and the number of the pick.
    """

    def hear(ended: CompletedRequest) -> None:
        has_ended(ended.model, ended.pick)

    return hear


def settler(limiter: Limiter, clock: Callable[[], float] = time.monotonic) -> Callable[[CompletedRequest], None]:
    """What tells limits how many tokens a request used, in place of those that were reserved for it."""

    def hear(ended: CompletedRequest) -> None:
        if ended.grant:
            limiter.settle(ended.grant, ended.tokens.prompt + ended.tokens.output, clock())

    return hear
