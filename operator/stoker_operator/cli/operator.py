"""``stoker operator``: watches InferenceEndpoints and runs their pods."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from stoker_common.command_parser import CommandParser
from stoker_common.logs import report_exit
from stoker_operator.process import logs
from stoker_operator.settings import GatewaySettings, LeaseSettings, Settings, WebhookSettings

if TYPE_CHECKING:
    from stoker_operator.workloads.composition import Composition

CRD_MISSING = (
    "this cluster lacks the kind InferenceEndpoint; install it with the Helm chart, or with "
    "`stoker crd | kubectl apply -f -`"
)
#: File in a pod that contains the pod's namespace.
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Logging(NamedTuple):
    """Format and level of the log."""

    format: str
    level: str


def main(argv: list[str], composition: Composition | None = None) -> int:
    """Run the command until SIGTERM or SIGINT, and return its exit code.

    Args:
        argv: arguments of the command line.
        composition: the workloads of an endpoint; the default is one Deployment.

    Returns:
        0 after a signal, 2 for an invalid command line, catalogue or policy, 1 for other errors.
    """
    # kopf handles signals after it has started. Before, the kernel would ignore SIGTERM for a container's first
    # process, so this handler is installed before slow imports. It exits without cleanup: nothing is running yet, and a
    # module that is being imported could swallow an exception.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        return _run(argv, composition)
    except KeyboardInterrupt:
        return 0


def _run(argv: list[str], composition: Composition | None = None) -> int:
    settings, logging = parse(argv)
    logs.configure(*logging)
    # The event loop answers admission reviews while threads reconcile. A fifth of Python's default switch interval
    # keeps the answers fast.
    sys.setswitchinterval(0.001)
    from stoker_operator.api.v1alpha1 import KIND
    from stoker_operator.api.violation import Refused
    from stoker_operator.cluster.kube import Kube, KubeError
    from stoker_operator.plan.catalogue import Catalogue
    from stoker_operator.policy.policy import Policy
    from stoker_operator.workloads.composition import ONE_DEPLOYMENT

    composition = composition or ONE_DEPLOYMENT
    try:
        catalogue = Catalogue.load(settings.catalogue)
        policy = Policy.load(settings.policy)
        kube = Kube.connect([each.resource for each in composition.kinds])
        if not kube.serves(KIND):
            report_exit("stoker_operator", "stoker operator", CRD_MISSING)
            return 1
    except Refused as error:
        report_exit("stoker_operator", "stoker operator", error)
        return 2
    except KubeError as error:
        report_exit("stoker_operator", "stoker operator", error)
        return 1
    from stoker_operator.manager import handlers  # imported late, because kopf's import takes a second

    try:
        handlers.run(settings, kube, catalogue, policy, composition)
    except handlers.KindGoneError as error:
        report_exit("stoker_operator", "stoker operator", f"{error}; {CRD_MISSING}")
        return 1
    except (KubeError, OSError) as error:
        report_exit("stoker_operator", "stoker operator", f"cannot start: {error}")
        return 1
    return 0


def parse(argv: list[str]) -> tuple[Settings, Logging]:
    """Parse the command line into settings, and the log's format and level."""
    parser = _parser()
    options = parser.parse_args(argv)
    namespace = options.operator_namespace or _pod_namespace()
    if (options.leader_elect or options.webhook_address) and not namespace:
        parser.error("--operator-namespace is required outside a pod")
    settings = Settings(
        namespaces=tuple(options.namespace),
        resync_seconds=options.resync_seconds,
        catalogue=options.catalogue,
        policy=options.policy,
        check_referenced_objects=options.check_referenced_objects,
        health_address=options.health_address,
        lease=LeaseSettings(namespace, options.lease_name) if options.leader_elect else None,
        webhook=_webhook(parser, options, namespace),
        gateway=_gateway(parser, options),
    )
    return settings, Logging(options.log_format, options.log_level)


def _webhook(parser: argparse.ArgumentParser, options: argparse.Namespace, namespace: str) -> WebhookSettings | None:
    """Return the webhook's settings, or None without a webhook. A flag without effect is an error."""
    external = options.webhook_certificate == "external"
    certificate_flags = {
        "--webhook-host": options.webhook_host,
        "--webhook-configuration": options.webhook_configuration,
    }
    if not options.webhook_address:
        set_flags = [
            flag for flag, value in {**certificate_flags, "--webhook-secret": options.webhook_secret}.items() if value
        ]
        if set_flags or external:
            parser.error(f"{(set_flags or ['--webhook-certificate'])[0]} requires --webhook-address")
        return None
    if not options.webhook_secret:
        parser.error("--webhook-address requires --webhook-secret")
    for flag, value in certificate_flags.items():
        if external and value:
            parser.error(f"{flag} has no effect with --webhook-certificate=external")
        if not external and not value:
            parser.error(f"--webhook-certificate=own requires {flag}")
    return WebhookSettings(
        address=options.webhook_address,
        namespace=namespace,
        secret=options.webhook_secret,
        hosts=tuple(options.webhook_host),
        configuration=options.webhook_configuration,
        external=external,
    )


def _gateway(parser: argparse.ArgumentParser, options: argparse.Namespace) -> GatewaySettings | None:
    """Return the gateway's settings, or None without a gateway. Its flags must be given together, except
    --gateway-signals."""
    flags = {
        "--gateway-url": options.gateway_url,
        "--gateway-namespace": options.gateway_namespace,
        "--gateway-service-account": options.gateway_service_account,
    }
    missing = [flag for flag, value in flags.items() if not value]
    if len(missing) == len(flags):
        if options.gateway_signals:
            parser.error(f"--gateway-signals requires {' and '.join(missing)}")
        return None
    if missing:
        first = next(flag for flag, value in flags.items() if value)
        parser.error(f"{first} requires {' and '.join(missing)}")
    if options.namespace:
        parser.error(
            "--gateway-url cannot be used with --namespace: an endpoint in a namespace that this operator does not "
            "watch may have the same model name; omit one of them"
        )
    return GatewaySettings(
        options.gateway_url, options.gateway_namespace, options.gateway_service_account, options.gateway_signals or ""
    )


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = CommandParser(prog="stoker operator", description="Run the Kubernetes operator.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="namespace to watch; repeatable (default: all)",
    )
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="additions and changes to the built-in accelerator catalogue"
    )
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="rules for what endpoints may use, and additions to their objects"
    )
    parser.add_argument(
        "--resync-seconds",
        type=_seconds,
        default=defaults.resync_seconds,
        metavar="SECONDS",
        help="interval at which every endpoint is reconciled, also without events (default: %(default)s)",
    )
    parser.add_argument(
        "--check-referenced-objects",
        action="store_true",
        help="report in endpoints' status which pods run with an outdated Secret or ConfigMap; requires permission to "
        "get both (default: off)",
    )
    parser.add_argument(
        "--health-address",
        type=_address,
        default=defaults.health_address,
        metavar="HOST:PORT",
        help="address of /healthz, /readyz and /metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: %(default)s)")
    parser.add_argument(
        "--operator-namespace",
        default="",
        metavar="NAME",
        help="namespace of the operator's Lease and Secret (default: the pod's own)",
    )

    replicas = parser.add_argument_group(
        "several replicas", "Only the leader writes to the cluster; all replicas answer admission reviews."
    )
    replicas.add_argument("--leader-elect", action="store_true", help="elect a leader with a Lease")
    replicas.add_argument(
        "--lease-name", default="stoker", metavar="NAME", help="name of the Lease (default: %(default)s)"
    )

    webhook = parser.add_argument_group("validating webhook", "Rejects invalid endpoints before they are stored.")
    webhook.add_argument(
        "--webhook-address", type=_address, metavar="HOST:PORT", help="address to listen on (default: no webhook)"
    )
    webhook.add_argument(
        "--webhook-secret", default="", metavar="NAME", help="name of the Secret with tls.crt, tls.key and ca.crt"
    )
    webhook.add_argument(
        "--webhook-certificate",
        choices=("own", "external"),
        default="own",
        help="own: the operator issues and renews the certificate; external: another controller does, such as "
        "cert-manager (default: %(default)s)",
    )
    webhook.add_argument(
        "--webhook-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name by which the API server reaches the webhook, for the certificate; repeatable",
    )
    webhook.add_argument(
        "--webhook-configuration",
        default="",
        metavar="NAME",
        help="name of the ValidatingWebhookConfiguration into whose caBundle the operator writes its own CA",
    )

    gateway = parser.add_argument_group(
        "gateway", "The gateway serves the endpoints of namespaces that have the label stoker.dev/gateway: enabled."
    )
    gateway.add_argument("--gateway-url", type=_url, metavar="URL", help="URL for clients (default: no gateway)")
    gateway.add_argument("--gateway-namespace", type=_label, metavar="NAME", help="namespace of the gateway's pods")
    gateway.add_argument(
        "--gateway-service-account",
        type=_account,
        metavar="NAME",
        help="service account of the gateway's pods, which gets access to the API keys of endpoints' engines",
    )
    gateway.add_argument(
        "--gateway-signals",
        type=_remote_address,
        metavar="HOST:PORT",
        help="host name that resolves to the addresses of all gateway replicas, and their metrics port; endpoints are "
        "scaled by the requests that the replicas report there (default: endpoints are not scaled)",
    )
    return parser


def _pod_namespace() -> str:
    try:
        return POD_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return f"{host}:{port}"


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        right = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an invalid port or IPv6 address
        right = False
    if not right or not text.isprintable() or " " in text or url.path.strip("/") or url.query or url.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// URL without a path")
    if url.username is not None:
        raise argparse.ArgumentTypeError("the URL must not have credentials: it is shown in every endpoint's status")
    return text.rstrip("/?#")


def _remote_address(text: str) -> str:
    address = _address(text)
    host, _, port = address.rpartition(":")
    if not host or not int(port) or any(each.isspace() or each in "/@," for each in host):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return address


def _label(text: str) -> str:
    if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid namespace name")
    return text


def _account(text: str) -> str:
    if not re.fullmatch("[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid service account name")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of seconds above 0")
    return seconds
