"""The operator's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LeaseSettings:
    """The Lease of the leader election."""

    namespace: str
    name: str


@dataclass(frozen=True)
class WebhookSettings:
    """Settings of the validating webhook.

    Attributes:
        address: HOST:PORT to listen on.
        namespace, secret: the Secret for the certificate (keys tls.crt, tls.key, ca.crt), which must exist.
        hosts: host names by which the API server reaches the webhook, for the certificate.
        configuration: the ValidatingWebhookConfiguration whose ``caBundle`` the operator writes; empty if `external`.
        external: whether another controller, such as cert-manager, manages the certificate and the ``caBundle``.
    """

    address: str
    namespace: str
    secret: str
    hosts: tuple[str, ...] = ()
    configuration: str = ""
    external: bool = False


@dataclass(frozen=True)
class GatewaySettings:
    """The gateway that serves endpoints.

    Attributes:
        url: URL for clients, without a path.
        namespace, service_account: namespace and service account of the gateway's pods.
        signals: ``HOST:PORT``: a name that resolves to the addresses of all gateway replicas, and the port at which
            they report their requests. If empty, the operator cannot scale endpoints by their load.
    """

    url: str
    namespace: str
    service_account: str
    signals: str = ""


@dataclass(frozen=True)
class Settings:
    """The operator's settings.

    Attributes:
        namespaces: the namespaces to watch; all if empty.
        resync_seconds: approximate interval at which every endpoint is reconciled, also without events.
        recheck_seconds: first pause after which an endpoint that is not ready is reconciled without events, because
            watches do not report every cause of pods that do not start. Consecutive ones double it, up to sixteen times
            as long. While pods are held, the pause is half as long.
        backoff_seconds: first pause after an error or a rejected object; consecutive ones double it, up to
            `resync_seconds`.
        reconcile_seconds: time after which a reconcile in progress is reported in the endpoint's status, and does not
            count towards the limit of concurrent reconciles.
        policy: file with the administrator's `Policy`.
        catalogue: file that extends and overrides the built-in accelerator catalogue.
        check_referenced_objects: whether status reports pods that run with outdated Secrets and ConfigMaps. The
            operator needs permission to get both kinds.
        health_address: HOST:PORT of ``/healthz``, ``/readyz`` and ``/metrics``; without HOST, the operator listens on
            all IPv6 and IPv4 addresses.
        lease: the Lease of the leader election, or None for a single replica.
        webhook: the validating webhook, if there is one.
        gateway: the gateway that serves endpoints, if there is one.
    """

    namespaces: tuple[str, ...] = ()
    resync_seconds: float = 600
    recheck_seconds: float = 2
    backoff_seconds: float = 1
    reconcile_seconds: float = 60
    catalogue: Path | None = None
    policy: Path | None = None
    check_referenced_objects: bool = False
    health_address: str = ":8080"
    lease: LeaseSettings | None = None
    webhook: WebhookSettings | None = None
    gateway: GatewaySettings | None = None
