"""Servers from the command line. A host name may have several addresses, and they may change.

Each address of a name is a server. Names are resolved periodically, and sooner if none of a model's servers is ready.
So the gateway finds the new addresses of a headless Service, or of a machine whose address has changed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stoker_gateway.registry.addresses import netloc
from stoker_gateway.registry.model_registry import ModelRegistry

logger = logging.getLogger(__name__)

#: Interval of lookups in seconds: normally, and while no server of a model is ready.
LOOKUP_S: Final = 30.0
SOON_S: Final = 1.0


def addresses_of(host: str, port: int | None) -> tuple[str, ...]:
    """Return a host's IPv4 addresses or, if it has none, its IPv6 addresses. Returning both would count machines twice.

    Raises:
        OSError, UnicodeError: the host cannot be resolved.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    of_4 = [str(each[4][0]) for each in found if each[0] == socket.AF_INET]
    addresses = of_4 or [str(each[4][0]) for each in found]
    return tuple(dict.fromkeys(each if "%" in each else str(ipaddress.ip_address(each)) for each in addresses))


@dataclass
class NamedServers:
    """Hosts and ports of each model's servers, and their addresses.

    Attributes:
        hosts: served name → hosts and ports; a host may be an IP address.
        look_up: returns the addresses of a host.
        known: host and port → addresses of the last successful lookup.
    """

    hosts: Mapping[str, Sequence[tuple[str, int]]]
    look_up: Callable[[str, int | None], tuple[str, ...]] = addresses_of
    known: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    @property
    def are_names(self) -> bool:
        """Whether any host is a name, whose addresses can change."""
        return any(not _is_address(host) for hosts in self.hosts.values() for host, _ in hosts)

    def servers(self) -> dict[str, tuple[str, ...]]:
        """Resolve the hosts, and return each model's servers. A name that cannot be resolved keeps its last addresses.

        Raises:
            OSError, UnicodeError: a name without known addresses cannot be resolved.
        """
        for host in dict.fromkeys(each for hosts in self.hosts.values() for each in hosts):
            try:
                self.known[host] = self.look_up(*host)
            except (OSError, UnicodeError) as error:
                if host not in self.known:
                    raise
                logger.warning("%s cannot be resolved: %s; its last addresses stay in use", host[0], error)
        return {
            name: tuple(dict.fromkeys(netloc(address, host[1]) for host in hosts for address in self.known[host]))
            for name, hosts in self.hosts.items()
        }

    async def watch(
        self,
        model_registry: ModelRegistry,
        change: Callable[[ModelRegistry], Awaitable[None]],
        any_lost: Callable[[], bool],
        lookup_s: float = LOOKUP_S,
    ) -> None:
        """Resolve the names periodically until cancelled.

        Args:
            model_registry: the current registry.
            change: called with the new registry when addresses have changed.
            any_lost: returns whether any model has servers, but none that is ready.
            lookup_s: maximum interval of lookups, in seconds.
        """
        loop = asyncio.get_running_loop()
        while True:
            until = loop.time() + lookup_s
            await asyncio.sleep(min(SOON_S, lookup_s))
            while loop.time() < until and not any_lost():  # noqa: ASYNC110 - pickers have no event for this
                await asyncio.sleep(min(SOON_S, until - loop.time()))
            found = await asyncio.to_thread(self.servers)
            endpoints = {name: replace(each, servers=found[name]) for name, each in model_registry.endpoints.items()}
            if any(
                set(each.servers) != set(model_registry.endpoints[name].servers) for name, each in endpoints.items()
            ):
                model_registry = ModelRegistry(endpoints)
                await change(model_registry)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
