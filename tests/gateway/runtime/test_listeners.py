"""Which objects receive a server's reports."""

from __future__ import annotations

from stoker_gateway.polling.poller import PollResult
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.runtime.listeners import listener
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Pick
from stoker_gateway.scheduling.routing_request import RoutingRequest


class _Picker(EndpointPicker):
    def __init__(self) -> None:
        super().__init__()
        self.heard = list[str]()

    def observe(self, server: str, load: ServerLoad, sent_at: float, now: float) -> None:
        self.heard.append(server)
        super().observe(server, load, sent_at, now)

    def failed(self, server: str, now: float) -> None:
        self.heard.append(server)
        super().failed(server, now)


def test_poll_results_reach_only_endpoints_with_that_server() -> None:
    servers = {"a": ("10.0.0.1:80", "10.0.0.2:80"), "b": ("10.0.0.2:80",), "c": ("10.0.0.3:80",)}
    model_registry = ModelRegistry({name: Endpoint(name, name, addresses) for name, addresses in servers.items()})
    pickers = {name: _Picker() for name in servers}
    for name, addresses in servers.items():
        pickers[name].set_servers(addresses, 0)
    woken = list[str]()
    hear = listener(model_registry, pickers, woken.append)
    hear(PollResult("10.0.0.2:80", ServerLoad(ready=False), 1.0))
    hear(PollResult("10.0.0.3:80", None, 1.0))
    hear(PollResult("10.0.0.4:80", None, 1.0))
    assert {name: picker.heard for name, picker in pickers.items()} == {
        "a": ["10.0.0.2:80"], "b": ["10.0.0.2:80"], "c": ["10.0.0.3:80"]
    }  # fmt: skip
    assert woken == ["a", "b", "c"]
    assert not isinstance(pickers["b"].pick(RoutingRequest(), 2.0), Pick)
