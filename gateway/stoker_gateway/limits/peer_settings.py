"""Settings for sharing limits with other replicas."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeerSettings:
    """Addresses of the replicas, and their shared secret.

    Attributes:
        listen: address at which this replica listens for messages, ``HOST:PORT``.
        token: shared secret of all replicas.
        addresses: addresses of the other replicas, ``HOST:PORT``.
        service: ``HOST:PORT`` whose host resolves to all replicas' addresses, which replace `addresses`; may be None.
    """

    listen: str
    token: str = field(repr=False)
    addresses: tuple[str, ...] = ()
    service: str | None = None
