"""Discovery of replicas by a DNS name."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from stoker_gateway.limits import peers as peers_module
from stoker_gateway.limits.peer_settings import PeerSettings
from stoker_gateway.limits.peers import Peers


def test_peers_follow_the_dns_names_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after changes; while name resolution fails, the peers stay."""
    reported: list[set[str]] = []
    answers: list[list[str] | OSError] = [
        OSError("no such name yet"),
        ["10.0.0.1", "fd00::2"],
        OSError("the name server is away"),
        ["10.0.0.1"],
    ]

    async def main() -> None:
        async def look_up(host: str, port: int, **_: Any) -> list[Any]:
            assert (host, port) == ("peers.ns.svc", 7001)
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            family = {True: socket.AF_INET6, False: socket.AF_INET}
            return [(family[":" in each], socket.SOCK_STREAM, 6, "", (each, port)) for each in answer]

        async def set_peers(addresses: set[str]) -> None:
            reported.append(addresses)

        monkeypatch.setattr(peers_module, "_LOOKUP_S", 0)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        peers = Peers(PeerSettings("127.0.0.1:0", "0123456789abcdef", service="peers.ns.svc:7001"))
        monkeypatch.setattr(peers.limiter, "set_peers", set_peers)
        with pytest.raises(IndexError):
            await peers.watch()

    asyncio.run(main())
    assert reported == [{"10.0.0.1:7001", "[fd00::2]:7001"}, {"10.0.0.1:7001"}]
