"""What a request asks of its endpoint's servers, as far as choosing one goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingRequest:
    """A request that wants a server.

    Attributes:
        chain: hashes of the full blocks of its prompt's text, as `stoker_common.text_prefix_hash` makes them.
        size: bytes of its prompt.
        session: what keeps it with the others of its session.
        held_by: the server, ``IP:PORT``, that holds the response it goes on from; no other can answer it.
        subset: the only servers it may go to; None stands for all.
    """

    chain: Sequence[bytes] = ()
    size: int = 0
    session: str | None = None
    held_by: str | None = None
    subset: frozenset[str] | None = None
