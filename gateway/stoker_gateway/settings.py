"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stoker_gateway.envoy.settings import UPLOAD_S, EnvoySettings, TLSFiles
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.kubernetes.facts import MAX_HOLD_S
from stoker_gateway.limits.peer_settings import PeerSettings


@dataclass(frozen=True)
class ExternalScalerSettings:
    """Settings of KEDA's external scaler.

    Attributes:
        listen: address to listen on, ``HOST:PORT``.
        reports: ``HOST:PORT`` of the replicas' reports. HOST resolves to all replicas, including this one; PORT is
            their metrics port.
    """

    listen: str
    reports: str


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of the gateway.

    Attributes:
        host, port: IP address and port for clients; port 0 chooses a free one.
        max_body_bytes: maximum size of a request body.
        tls: certificate; None means that connections are not encrypted.
        drain_delay_s: seconds for which connections are still accepted at shutdown, while ``/ready`` fails.
        drain_s: maximum time that active requests may take after that, in seconds.
        peers: settings for sharing the keys' limits with other replicas; None means that they are not shared.
        metrics_port: port of `MetricsServer`, on the same host; None means no metrics.
        access_log: whether to log each request to standard output.
        billing_log: file for a line about each request that used tokens; ``-`` means standard output, and None no such
            log.
        json_log: whether Envoy's own log is JSON.
        max_held, max_held_bytes: maximum number of held requests of an endpoint with scaling, and maximum size of their
            bodies together.
        holds: whether there may be endpoints with scaling, whose requests are held.
        external_scaler: settings of KEDA's external scaler; None means that the gateway does not provide it.
        allowed_origins: origins whose pages may use the gateway (CORS), as browsers send them; ``*`` means any.
        fail_open: Envoy cluster for requests while the picker fails; None means that they are rejected.
    """

    host: str
    port: int
    max_body_bytes: int = 32 << 20
    tls: TLSFiles | None = None
    drain_delay_s: float = 0
    drain_s: float = 600
    peers: PeerSettings | None = None
    metrics_port: int | None = None
    access_log: bool = False
    billing_log: str | None = None
    json_log: bool = False
    fail_open: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_held: int = 1000
    max_held_bytes: int = 64 << 20
    holds: bool = False
    external_scaler: ExternalScalerSettings | None = None

    @property
    def limits(self) -> RequestLimits:
        """Limits of the requests that the picker accepts."""
        limits = RequestLimits(
            max_body_bytes=self.max_body_bytes, max_held=self.max_held, max_held_bytes=self.max_held_bytes
        )
        return replace(limits, upload_s=UPLOAD_S) if self.holds else limits

    def envoy(self, folder: Path) -> EnvoySettings:
        """Return Envoy's settings, with this folder for its sockets and files."""
        return EnvoySettings(
            self.host,
            self.port,
            folder,
            self.limits.max_wait_s,
            self.max_body_bytes,
            tls=self.tls,
            access_log=self.access_log,
            json_log=self.json_log,
            fail_open=self.fail_open,
            allowed_origins=self.allowed_origins,
            max_held_s=MAX_HOLD_S if self.holds else 0,
        )
