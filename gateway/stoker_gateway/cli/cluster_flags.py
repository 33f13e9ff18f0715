"""Flags of ``stoker gateway`` that apply with ``--kubernetes``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stoker_gateway.cli import peer_flags
from stoker_gateway.registry.addresses import netloc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from stoker_gateway.kubernetes.cluster_watch import ClusterWatch
    from stoker_gateway.limits.peer_settings import PeerSettings
    from stoker_gateway.settings import ExternalScalerSettings

#: Default limits of held requests of an endpoint: number of requests, and bytes of their bodies.
MAX_HELD: Final = 1000
MAX_HELD_BYTES: Final = 64 << 20

_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
#: Listening address for all addresses → address at which the process reaches itself.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: File in which Kubernetes provides a pod's namespace.
_OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def add_to(parser: argparse.ArgumentParser, source: Any) -> None:
    """Add the flags.

    Args:
        parser: parser of the command.
        source: mutually exclusive group of the flags that determine the models.
    """
    source.add_argument(
        "--kubernetes",
        action="store_true",
        help="route requests to the cluster's InferenceEndpoints that the operator marks as served; clients need keys",
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="with --kubernetes: the namespace of the clients' keys (default: the gateway's own)",
    )
    parser.add_argument(
        "--max-held",
        type=_count,
        metavar="REQUESTS",
        help="with --kubernetes: maximum number of requests held for an endpoint with scaling until one of its pods "
        f"is ready; more are rejected (default: {MAX_HELD})",
    )
    parser.add_argument(
        "--max-held-bytes",
        type=_count,
        metavar="BYTES",
        help="with --kubernetes: maximum size of an endpoint's held bodies together; at least --max-body-size "
        f"(default: {MAX_HELD_BYTES}, or --max-body-size if that is more)",
    )
    parser.add_argument(
        "--external-scaler-listen",
        type=peer_flags.address,
        metavar="HOST:PORT",
        help="with --kubernetes: serve KEDA's external push scaler at this address; needs --metrics-port "
        "(default: it is not served)",
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check the combination of flags, and set the default namespace; exit with a message for an invalid combination."""
    if not options.kubernetes:
        if options.namespace is not None:
            parser.error("argument --namespace: not allowed without --kubernetes; add it, or leave out --namespace")
        for flag, value in (("--max-held", options.max_held), ("--max-held-bytes", options.max_held_bytes)):
            if value is not None:
                parser.error(f"argument {flag}: not allowed without --kubernetes, because no requests are held then")
        if options.external_scaler_listen is not None:
            parser.error(
                "argument --external-scaler-listen: not allowed without --kubernetes, because nothing is scaled then"
            )
        return
    if options.max_held_bytes is not None and options.max_held_bytes < options.max_body_size:
        parser.error(
            f"argument --max-held-bytes: must be at least --max-body-size, {options.max_body_size}; raise it, or lower "
            "--max-body-size"
        )
    if options.keys is not None:
        parser.error(
            "argument --keys: with --kubernetes, keys are Secrets; create them with `stoker keys create --namespace`"
        )
    if options.session_header is not None:
        parser.error(
            "argument --session-header: with --kubernetes, set it for each endpoint in spec.routing.sessionHeader"
        )
    if options.namespace is None:
        try:
            options.namespace = _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            parser.error(
                "argument --namespace: required outside of a pod; set it to the namespace of the clients' keys"
            )
    if not _NAMESPACE.fullmatch(options.namespace):
        parser.error(f"argument --namespace: {options.namespace!r} is not a valid namespace name")


def external_scaler(
    parser: argparse.ArgumentParser, options: argparse.Namespace, peers: PeerSettings | None
) -> ExternalScalerSettings | None:
    """Return the settings of KEDA's external scaler; None without the flag. An invalid command line exits the
    process."""
    if options.external_scaler_listen is None:
        return None
    from stoker_gateway.settings import ExternalScalerSettings

    if not options.metrics_port:
        parser.error(
            "argument --external-scaler-listen: replicas read each other's reports on their metrics ports; add "
            "--metrics-port, with the same port for all replicas"
        )
    if peers is None:
        host = netloc(_LOOPBACK.get(options.host, options.host), 0).rpartition(":")[0]
    elif peers.service is None:
        parser.error(
            "argument --external-scaler-listen: replicas are found by --peer-service; use it instead of --peer"
        )
    else:
        host = peers.service.rpartition(":")[0]
    return ExternalScalerSettings(options.external_scaler_listen, f"{host}:{options.metrics_port}")


def cluster(namespace: str, *, holds_external: bool) -> Callable[[CollectorRegistry], ClusterWatch]:
    """Return a function that creates the watch of the cluster of the kubeconfig or of this pod.

    Args:
        namespace: namespace of the clients' keys.
        holds_external: see `ClusterWatch`.

    Raises:
        GatewayError: no usable configuration was found.
    """
    from stoker_gateway.kubernetes.api import Api
    from stoker_gateway.kubernetes.cluster_watch import ClusterWatch

    api = Api.connect()
    return lambda registry: ClusterWatch(api, namespace, registry, holds_external=holds_external)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {10**12 - 1}")
    return int(text)
