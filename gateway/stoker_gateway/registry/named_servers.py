"""Servers that a command line names by host: a name may have several addresses, and others later.

All of a name's addresses are servers. It is looked up again now and then, and at once when none of a model's servers
answers: behind a headless Service, or where a machine came back by another address, that is how the new ones are found.
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

#: Seconds between looks at the names, and between those while servers of a model are all lost.
LOOKUP_S: Final = 30.0
SOON_S: Final = 1.0


def addresses_of(host: str, port: int | None) -> tuple[str, ...]:
    """All IP addresses of a host: those of IPv4 if it has both kinds, which are the same machines.

    Raises:
        OSError, UnicodeError: it has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    of_4 = [str(each[4][0]) for each in found if each[0] == socket.AF_INET]
    addresses = of_4 or [str(each[4][0]) for each in found]
    return tuple(dict.fromkeys(each if "%" in each else str(ipaddress.ip_address(each)) for each in addresses))


@dataclass
class NamedServers:
    """The hosts and ports of each model, and where they are.

    Attributes:
        hosts: served name → hosts with ports; an IP address is its own.
        look_up: all addresses of a host.
        known: what was last found.
    """

    hosts: Mapping[str, Sequence[tuple[str, int]]]
    look_up: Callable[[str, int | None], tuple[str, ...]] = addresses_of
    known: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    @property
    def are_names(self) -> bool:
        """Whether there is anything to look up again."""
        return any(not _is_address(host) for hosts in self.hosts.values() for host, _ in hosts)

    def servers(self) -> dict[str, tuple[str, ...]]:
        """Looks up where each model's servers are. A name that has no address now keeps those that it had.

        Raises:
            OSError, UnicodeError: a name has none, and had none.
        """
        for host in dict.fromkeys(each for hosts in self.hosts.values() for each in hosts):
            try:
                self.known[host] = self.look_up(*host)
            except (OSError, UnicodeError) as error:
                if host not in self.known:
                    raise
                logger.warning("%s cannot be resolved; the addresses found before stay in use: %s", host[0], error)
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
        """Looks names up again, until it is cancelled.

        Args:
            model_registry: what is served at first.
            change: told what is served from now on.
            any_lost: whether a model has no server that answers.
        """
        loop = asyncio.get_running_loop()
        while True:
            until = loop.time() + lookup_s
            await asyncio.sleep(min(SOON_S, lookup_s))
            while loop.time() < until and not any_lost():  # noqa: ASYNC110 - pickers tell nobody
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
