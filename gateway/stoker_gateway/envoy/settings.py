"""Settings of Envoy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Maximum time in which a client must send a request, in seconds.
UPLOAD_S: Final = 120.0


@dataclass(frozen=True)
class TLSFiles:
    """Paths of a certificate and its key, in PEM. Envoy reloads both when a file or symbolic link is moved into the
    certificate's folder, as in a mounted Secret. It ignores writes in place."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class EnvoySettings:
    """Settings of Envoy. Durations are in seconds.

    Attributes:
        host: IP address to listen on.
        port: port to listen on; 0 chooses a free one.
        folder: folder of sockets and files; its path must be short, because a socket's path has at most 107 bytes.
        max_wait_s: maximum time that a request waits in the picker's queue for a server with room.
        max_held_s: maximum time that the picker holds a request until a server is ready; 0 means that requests are not
            held. If requests are held, the picker limits the upload time of a request, instead of Envoy.
        max_body_bytes: maximum size of a request body. The body is in memory until the server has received it.
        upload_s: maximum time in which a client must send a request and the picker must route it.
        headers_s: maximum time in which a client must send its headers.
        idle_s: maximum idle time of a stream, in both directions. It must exceed the time to the first token.
        max_connections: maximum number of client connections; Envoy closes further connections.
        threads: number of Envoy's worker threads.
        tls: certificate; None means that connections are not encrypted.
        access_log: whether to log each request to standard output.
        json_log: whether Envoy's own log, on standard error, is JSON.
        allowed_origins: origins whose pages may use the gateway (CORS), as browsers send them; ``*`` means any.
        fail_open: cluster to which requests go while the picker fails; None means that requests are rejected.
    """

    host: str
    port: int
    folder: Path
    max_wait_s: float
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
        """Path of the picker's socket."""
        return self.folder / "picker.sock"

    @property
    def admin_socket(self) -> Path:
        """Path of the socket of Envoy's admin interface. A process that can connect to it can stop Envoy."""
        return self.folder / "admin.sock"

    @property
    def clusters_file(self) -> Path:
        """Path of the clusters file."""
        return self.folder / "clusters.json"

    @property
    def certificate_file(self) -> Path:
        """Path of the file that names the certificate."""
        return self.folder / "certificate.json"

    def servers_file(self, cluster: str) -> Path:
        """Return the path of the file of a cluster's servers."""
        return self.folder / "servers" / f"{cluster}.json"
