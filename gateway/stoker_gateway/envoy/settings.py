"""What can be chosen about Envoy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Seconds that a client may take to send a request.
UPLOAD_S: Final = 120.0


@dataclass(frozen=True)
class TLSFiles:
    """A certificate and its key, in PEM. They are read again when they are replaced, as a Secret's are in a pod."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class EnvoySettings:
    """What can be chosen about Envoy.

    Attributes:
        host: the IP address it listens on.
        port: the port; 0: one that is free.
        folder: where its sockets and files are; its path is short, since a socket's path has at most 107 bytes.
        hold_s: the longest that a request waits in the picker for a server with room.
        max_held_s: the longest that the picker holds a request until a server is ready at all; 0: it holds none. The
            picker, and not Envoy, then limits the time that a request takes to come.
        max_body_bytes: the longest body of a request. Each request's body is in memory until its server has it.
        upload_s: the longest that a client may take to send a request, with what the picker then takes to place it.
        headers_s: the longest that a client may take to send its headers.
        idle_s: the longest that a stream may be silent, in either direction. A prompt's first token comes within it.
        max_connections: of clients at once; more are closed as they come.
        threads: that move bytes.
        tls: what proves to clients who it is; None: connections are not encrypted.
        access_log: whether each request is told on standard output.
        json_log: whether its own log, on standard error, is JSON.
        allowed_origins: pages of which may use it, as browsers say them; ``*``: of any.
        fail_open: the cluster that requests go to while the picker fails; None: they are refused.
    """

    host: str
    port: int
    folder: Path
    hold_s: float
    max_body_bytes: int = 32 << 20
    upload_s: float = UPLOAD_S
    headers_s: float = 10
    idle_s: float = 3600
    max_connections: int = 20_000
    threads: int = 2
    tls: TLSFiles | None = None
    access_log: bool = False
    json_log: bool = False
    fail_open: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_held_s: float = 0

    @property
    def picker_socket(self) -> Path:
        """Where the picker listens."""
        return self.folder / "picker.sock"

    @property
    def admin_socket(self) -> Path:
        """Where Envoy's administration listens. Whoever reaches it can end Envoy."""
        return self.folder / "admin.sock"

    @property
    def clusters_file(self) -> Path:
        """Which clusters there are."""
        return self.folder / "clusters.json"

    @property
    def certificate_file(self) -> Path:
        """Where its certificate is said to be."""
        return self.folder / "certificate.json"

    def servers_file(self, cluster: str) -> Path:
        """Which servers a cluster has."""
        return self.folder / "servers" / f"{cluster}.json"
