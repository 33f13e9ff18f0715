"""The operator's settings, as it is started with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LeaseSettings:
    """How replicas agree on the one that writes.

    Attributes:
        namespace, name: the Lease they do it by.
    """

    namespace: str
    name: str


@dataclass(frozen=True)
class WebhookSettings:
    """How endpoints are judged before they are stored.

    Attributes:
        address: where reviews are answered, as HOST:PORT.
        namespace, secret: the Secret that holds the certificate (keys tls.crt, tls.key, ca.crt). It must exist.
        hosts: what the API server calls us by; the certificate is for these.
        configuration: the ValidatingWebhookConfiguration whose ``caBundle`` is ours to write.
        external: another controller, as cert-manager, owns the certificate and the ``caBundle``.
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
        url: where clients reach it, without a path.
        namespace, service_account: who it is.
        signals: ``HOST:PORT``, a name whose addresses are all its replicas', where they report requests; empty:
            nowhere, so no endpoint can be scaled by them.
    """

    url: str
    namespace: str
    service_account: str
    signals: str = ""


@dataclass(frozen=True)
class Settings:
    """How the operator runs.

    Attributes:
        namespaces: those it looks after; none means all of them.
        resync_seconds: how often every endpoint is looked at again, whatever happened or did not.
        recheck_seconds: how soon an endpoint is looked at again that is not ready yet; up to sixteen times that while
            nothing happens. Events report most of it, but not why pods do not start.
        backoff_seconds: the first pause after an error; it doubles up to `resync_seconds`.
        reconcile_seconds: a reconcile that takes longer is reported in the endpoint's status, and holds up no other.
        policy: a file that states what is permitted to endpoints, and what is added to their objects.
        catalogue: a file that extends and overrides the built-in accelerator catalogue.
        check_referenced_objects: whether status says that pods run with earlier Secrets and ConfigMaps, of which the
            operator must then be permitted to read the metadata.
        health_address: where ``/healthz``, ``/readyz`` and ``/metrics`` answer, as HOST:PORT; without HOST at
            every address of IPv6 and IPv4.
        lease: how replicas agree on the one that writes; None: there is one replica.
        webhook: how endpoints are judged before they are stored; None: they are not.
        gateway: the gateway that serves endpoints; None: there is none.
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
