"""What can be chosen about replicas."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeerSettings:
    """Who the other replicas are.

    Attributes:
        listen: where they reach this one, ``HOST:PORT``.
        token: that all replicas know.
        addresses: of the others, ``HOST:PORT``.
        service: a name whose addresses are all replicas', this one's own too, ``HOST:PORT``; None: `addresses` are all.
    """

    listen: str
    token: str = field(repr=False)
    addresses: tuple[str, ...] = ()
    service: str | None = None
