"""Who is told what a server answers to the poller: the pickers of the endpoints that have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from stoker_gateway.directory import Directory
from stoker_gateway.picking.picker import EndpointPicker
from stoker_gateway.polling import Heard


def listener(
    directory: Directory, pickers: Mapping[str, EndpointPicker], wake: Callable[[str], None]
) -> Callable[[Heard], None]:
    """What takes a server's answers to the endpoints that have it, and to no others.

    Args:
        pickers: by served name.
        wake: told the served name of each that may have room now.
    """
    names_of: dict[str, list[str]] = {}
    for name, endpoint in directory.endpoints.items():
        for server in endpoint.servers:
            names_of.setdefault(server, []).append(name)

    def hear(heard: Heard) -> None:
        for name in names_of.get(heard.server, ()):
            if heard.load is None:
                pickers[name].failed(heard.server, time.monotonic())
            else:
                pickers[name].observe(heard.server, heard.load, heard.sent_at, time.monotonic())
            wake(name)

    return hear
