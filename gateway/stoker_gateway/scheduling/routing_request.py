"""The properties of a request that determine its server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingRequest:
    """A request for which a server is chosen.

    Attributes:
        chain: hashes of the full blocks of its prompt's text, from `stoker_common.text_prefix_hash`.
        size: size of its prompt's text in bytes.
        session: session id; requests of a session go to the same server if possible.
        held_by: ``IP:PORT`` of the server that stores the response that the request continues or retrieves; None if
            there is none, or the server is unknown.
        subset: servers to which it may be sent; None means all.
    """

    chain: Sequence[bytes] = ()
    size: int = 0
    session: str | None = None
    held_by: str | None = None
    subset: frozenset[str] | None = None
