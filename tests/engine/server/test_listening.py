"""Listening addresses: all IPv4 and IPv6 addresses by default."""

from __future__ import annotations

import socket

import pytest

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.http import bind as binding
from stoker_engine.server.http.bind import bind


def reached(bound: socket.socket, host: str) -> bool:
    bound.listen()
    try:
        with socket.create_connection((host, bound.getsockname()[1]), 120):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not binding._has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "ipv4", "ipv6"), [(FrontendArgs().host, True, True), ("0.0.0.0", True, False), ("::1", False, True)]
)
def test_the_server_is_reachable_over_its_address_families(host: str, ipv4: bool, ipv6: bool) -> None:
    with bind(host, 0) as bound:
        assert (reached(bound, "127.0.0.1"), reached(bound, "::1")) == (ipv4, ipv6)


def test_a_machine_without_ipv6_listens_at_every_address_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_has_ipv6", lambda: False)
    with bind(FrontendArgs().host, 0) as bound:
        assert bound.family == socket.AF_INET
        assert reached(bound, "127.0.0.1")
