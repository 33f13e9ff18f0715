"""The address at which this machine listens for other nodes, and the network interface that reaches a host."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from pathlib import Path
from typing import Final

#: Linux' request for an interface's address.
_SIOCGIFADDR: Final = 0x8915


def listen(host: str, port: int) -> socket.socket:
    """Listen on TCP at `host`, or at all addresses if `host` does not resolve to an address of this machine.

    Args:
        port: 0: any free port.

    Raises:
        OSError: the port cannot be opened.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:  # in Kubernetes the name may not resolve until this pod is ready
        return _listen_everywhere(port)
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=128)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _listen_everywhere(port)


def _listen_everywhere(port: int) -> socket.socket:
    """Listen at all addresses of both IP versions, or of IPv4 if this machine has no IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def interface_towards(host: str) -> str:
    """Return the network interface by which this machine reaches `host`, which may be this machine.

    Raises:
        OSError: the host does not resolve, there is no route to it, or the route's interface is not found.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # sends nothing
        local_address = sock.getsockname()[0]
        for _, name in socket.if_nameindex():
            if local_address in (_ipv6_addresses(name) if family == socket.AF_INET6 else _ipv4_addresses(name, sock)):
                return name
    if local_address.startswith("127."):
        return "lo"
    raise OSError(errno.EADDRNOTAVAIL, f"no network interface has the address {local_address}; set GLOO_SOCKET_IFNAME")


def _ipv4_addresses(name: str, sock: socket.socket) -> list[str]:
    try:
        found = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return []  # the interface has no IPv4 address
    return [socket.inet_ntoa(found[20:24])]


def _ipv6_addresses(name: str) -> list[str]:
    lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])) for line in lines if line[-1] == name]
