"""What can be chosen about the gateway."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stoker_gateway.envoy.settings import UPLOAD_S, EnvoySettings, TLSFiles
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.kubernetes.facts import MAX_HOLD_S
from stoker_gateway.limits.peer_settings import PeerSettings


@dataclass(frozen=True)
class ExternalScalerSettings:
    """Where KEDA is answered.

    Attributes:
        listen: the address for KEDA, ``HOST:PORT``.
        reports: a name whose addresses are all replicas', this one's own too, and their metrics' port: ``HOST:PORT``.
    """

    listen: str
    reports: str


@dataclass(frozen=True)
class GatewaySettings:
    """What can be chosen about the gateway.

    Attributes:
        host, port: where clients are served; an IP address, and port 0 is one that is free.
        max_body_bytes: of a request.
        tls: what proves to clients who the gateway is; None: connections are not encrypted.
        drain_delay_s: how long connections are still taken in the end, while ``/ready`` says no.
        drain_s: how long requests under way may take then.
        peers: the other replicas, with which the keys' limits are shared; None: there are none.
        metrics_port: of /metrics, on the same host; None: nowhere.
        access_log: whether each request is told on standard output.
        billing_log: the file for lines about the tokens of requests; ``-``: standard output; None: nowhere.
        json_log: whether Envoy's log is JSON.
        max_held: requests of an endpoint with scaling that are held while none of its servers is ready, at most.
        max_held_bytes: of their bodies.
        holds: whether there may be such endpoints.
        external_scaler: where KEDA is answered; None: nowhere.
        allowed_origins: pages of which may use it, as browsers say them; ``*``: of any.
        fail_open: the cluster whose servers Envoy chooses among while the picker fails; None: requests are then
            refused.
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
        """What the picker takes in."""
        limits = RequestLimits(
            max_body_bytes=self.max_body_bytes, max_held=self.max_held, max_held_bytes=self.max_held_bytes
        )
        return replace(limits, upload_s=UPLOAD_S) if self.holds else limits

    def envoy(self, folder: Path) -> EnvoySettings:
        """Envoy's, with this folder for its sockets and files."""
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
