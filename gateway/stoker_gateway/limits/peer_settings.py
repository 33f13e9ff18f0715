"""Settings for sharing limits with other replicas."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeerSettings:
    """Addresses of this replica and the others.

    Attributes:
        listen: address at which this replica listens for the others, ``HOST:PORT``.
        token: shared secret of all replicas.
        addresses: addresses of the others, ``HOST:PORT``.
        service: ``HOST:PORT`` whose host resolves to all replicas, including this one; if None, `addresses` has all
            others.
    """

    listen: str
    token: str = field(repr=False)
    addresses: tuple[str, ...] = ()
    service: str | None = None
