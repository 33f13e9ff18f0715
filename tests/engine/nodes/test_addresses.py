"""The addresses at which a machine listens for other nodes."""

from __future__ import annotations

import errno
import socket
from typing import NoReturn

import pytest

from stoker_engine.nodes.addresses import listen
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.parallel.rendezvous import rendezvous_at


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


def _unresolved(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _elsewhere(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", port))]


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")
@pytest.mark.parametrize("resolves", [_unresolved, _elsewhere])
def test_head_listens_on_both_ip_versions_if_its_address_is_not_known(
    resolves: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolves)
        listening = listen("head-0.heads.default.svc", 0)
    with listening:
        port = listening.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port)):
                accepted, _ = listening.accept()
                connection = NodeConnection(accepted)
                assert connection.address == address
                connection.close()


@pytest.mark.parametrize("resolves", [_unresolved, _elsewhere])
def test_rendezvous_is_served_if_its_address_is_not_known(resolves: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    with rendezvous_at("head-0.heads.default.svc") as url:
        assert url.startswith("tcp://head-0.heads.default.svc:")


def test_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ipv6(family: int = socket.AF_INET, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return plain(family, *rest)

    plain = socket.socket
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", _unresolved)
        patch.setattr(socket, "socket", no_ipv6)
        listening = listen("head-0.heads.default.svc", 0)
    with listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])):
        assert listening.family == socket.AF_INET
