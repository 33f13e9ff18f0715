"""The gateway's listening addresses."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from stoker_gateway.registry import addresses
from stoker_gateway.registry.addresses import EVERY, bind, usable
from stoker_gateway.runtime.metrics_server import MetricsServer


@pytest.mark.skipif(usable(EVERY) != EVERY, reason="this machine has no IPv6")
def test_metrics_are_served_over_ipv4_and_ipv6() -> None:
    async def statistics() -> str:
        return ""

    async def main() -> None:
        server = MetricsServer(CollectorRegistry(), statistics, EVERY, 0)
        port = await server.start()
        async with aiohttp.ClientSession() as session:
            for host in ("127.0.0.1", "[::1]"):
                async with session.get(f"http://{host}:{port}/metrics") as answer:
                    assert answer.status == 200
        await server.stop()

    asyncio.run(main())


def test_wildcard_address_is_ipv4_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ipv6(family: int) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(addresses.socket, "socket", no_ipv6)
    assert usable(EVERY) == "0.0.0.0"
    assert usable("127.0.0.1") == "127.0.0.1"


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
