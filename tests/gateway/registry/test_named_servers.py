"""Servers by host name: all addresses, which are resolved periodically."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.registry.named_servers import NamedServers, addresses_of

from ...support.virtual_time import elapse

VirtualTime = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


def test_all_addresses_of_a_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*addresses: tuple[int, str]) -> Any:
        return lambda *_, **__: [(family, 1, 6, "", (address, 80)) for family, address in addresses]

    four, six = socket.AF_INET, socket.AF_INET6
    monkeypatch.setattr(socket, "getaddrinfo", found((four, "10.0.0.2"), (four, "10.0.0.1"), (four, "10.0.0.2")))
    assert addresses_of("name", 80) == ("10.0.0.2", "10.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", found((six, "::1"), (four, "127.0.0.1")))
    assert addresses_of("name", 80) == ("127.0.0.1",)
    monkeypatch.setattr(socket, "getaddrinfo", found((six, "fd00::0001"), (six, "fd00::2")))
    assert addresses_of("name", 80) == ("fd00::1", "fd00::2")


def test_names_are_looked_up_every_half_minute_and_soon_when_all_servers_are_lost(virtual_time: VirtualTime) -> None:
    addresses, changes, lost = ["10.0.0.1"], list[tuple[float, tuple[str, ...]]](), False

    def look_up(host: str, port: int | None) -> tuple[str, ...]:
        if not addresses:
            raise OSError("no such name")
        return (host,) if host.startswith("10.") else tuple(addresses)

    named = NamedServers({"m": [("name", 80), ("10.0.0.9", 81)]}, look_up)

    async def main() -> None:
        nonlocal lost
        loop = asyncio.get_running_loop()

        async def change(model_registry: ModelRegistry) -> None:
            changes.append((loop.time(), model_registry.endpoints["m"].servers))

        async def looked(function: Callable[[], Any]) -> Any:
            return function()

        asyncio.to_thread, before = looked, asyncio.to_thread  # type: ignore[assignment]
        try:
            first = ModelRegistry({"m": Endpoint("m", "m", named.servers()["m"])})
            watching = asyncio.create_task(named.watch(first, change, lambda: lost))
            await elapse(40)
            assert not changes
            addresses[:] = ["10.0.0.2", "10.0.0.3"]
            await elapse(30)
            assert changes.pop() == (60.0, ("10.0.0.2:80", "10.0.0.3:80", "10.0.0.9:81"))
            addresses.clear()
            await elapse(30)  # addresses stay if resolution fails
            addresses[:] = ["10.0.0.4"]
            lost = True
            await elapse(2)
            [(at, servers)] = changes
            assert at < 103 and servers == ("10.0.0.4:80", "10.0.0.9:81")
            watching.cancel()
        finally:
            asyncio.to_thread = before  # type: ignore[assignment]

    virtual_time(main)


def test_ip_addresses_do_not_count_as_host_names() -> None:
    assert not NamedServers({"m": [("10.0.0.1", 80), ("::1", 80)]}).are_names
    assert NamedServers({"m": [("10.0.0.1", 80), ("host", 80)]}).are_names
