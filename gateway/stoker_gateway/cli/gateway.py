"""``stoker gateway``: one address for the servers of many models."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from stoker_common import logs
from stoker_common.command_parser import CommandParser
from stoker_gateway.cli import cluster_flags, peer_flags, tls_flags
from stoker_gateway.errors import GatewayError
from stoker_gateway.registry.addresses import netloc, usable
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, cluster_name
from stoker_gateway.registry.named_servers import NamedServers, addresses_of

if TYPE_CHECKING:
    from stoker_gateway.keys.key_file import KeyFile
    from stoker_gateway.settings import GatewaySettings

_ENDPOINT: Final = "NAME=http://HOST:PORT"
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
#: Headers that cannot identify a session: Envoy may remove or change them, or they describe the connection or body.
_NO_SESSION: Final = re.compile(r"x-(stoker|gateway|envoy)-.*|host|connection|content-length|transfer-encoding|te")


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT, and return the exit code: 1 if the gateway cannot serve. An invalid command line
    exits with code 2."""
    command = parse_command(argv)
    from stoker_gateway.runtime import supervisor

    return exit_code_of(supervisor.run(command.settings, command.model_registry, argv))


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        model_registry: models to serve; None means that models come from the cluster.
        keys: file of the clients' keys; None means that keys come from the cluster, or requests need no key.
        namespace: namespace of the clients' keys in the cluster; None without ``--kubernetes``.
        names: hosts of the registry's servers; None with ``--kubernetes``.
    """

    settings: GatewaySettings
    model_registry: ModelRegistry | None
    keys: KeyFile | None
    namespace: str | None
    names: NamedServers | None = None


def parse_command(argv: list[str]) -> Command:
    """Parse a command line and configure logging; an invalid one exits the process with a message."""
    parser = parser_of()
    options = parser.parse_args(argv)
    if options.metrics_port is not None and options.metrics_port == options.port != 0:
        parser.error(f"--metrics-port and --port are both {options.port}; choose different ports")
    if options.access_log and options.billing_log == "-":
        parser.error("--access-log and --billing-log both write to standard output; give --billing-log a file")
    if options.billing_log == "":
        parser.error("--billing-log is empty; give it a file, or - for standard output")
    cluster_flags.check(parser, options)
    names = None if options.kubernetes else _named(options.endpoint)
    model_registry = None if names is None else _model_registry(names.servers(), options.session_header)
    fail_open = _fail_open(parser, options, model_registry) if options.picker_failure_mode == "fail-open" else None
    logs.configure(options.log_format)
    from stoker_gateway.keys.errors import KeyManifestError
    from stoker_gateway.keys.key_file import KeyFile
    from stoker_gateway.settings import GatewaySettings

    try:
        keys = None if options.keys is None else KeyFile(options.keys)
    except KeyManifestError as error:
        parser.error(f"argument --keys: {error}")
    peers = peer_flags.settings_of(parser, options)
    if peers is not None and keys is None and not options.kubernetes:
        parser.error("the flags --peer-… share the limits of keys; add --keys")
    settings = GatewaySettings(
        options.host,
        options.port,
        options.max_body_size,
        tls_flags.files_of(parser, options),
        options.drain_delay,
        options.drain_timeout,
        peers,
        metrics_port=options.metrics_port,
        access_log=options.access_log,
        billing_log=options.billing_log,
        json_log=options.log_format == "json",
        fail_open=fail_open,
        allowed_origins=tuple(options.allowed_origins),
        max_held=options.max_held or cluster_flags.MAX_HELD,
        max_held_bytes=options.max_held_bytes or max(cluster_flags.MAX_HELD_BYTES, options.max_body_size),
        holds=options.kubernetes,
        external_scaler=cluster_flags.external_scaler(parser, options, peers),
    )
    return Command(settings, model_registry, keys, options.namespace if options.kubernetes else None, names)


def _fail_open(
    parser: argparse.ArgumentParser, options: argparse.Namespace, model_registry: ModelRegistry | None
) -> str:
    """Return the models' only Envoy cluster. Exit with a message if there may be several, because only the picker knows
    a request's cluster, or if requests need keys, because only the picker checks them."""
    why = "--picker-failure-mode fail-open forwards requests unchecked"
    if model_registry is None:
        parser.error(f"{why}, but with --kubernetes requests need keys; leave out one of them")
    if options.keys is not None:
        parser.error(f"{why}, but with --keys requests need keys; leave out one of them")
    clusters = {endpoint.cluster for endpoint in model_registry.endpoints.values()}
    if len(clusters) > 1:
        names = ", ".join(sorted(model_registry.endpoints))
        parser.error(f"{why}, so there may be only one model, not {names}; use the same NAME in each --endpoint")
    return clusters.pop()


def exit_code_of(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` and return its exit code; if a part of the gateway cannot serve, report the error and return 1."""
    try:
        return asyncio.run(work)
    except (GatewayError, OSError) as error:
        logs.report_exit("stoker_gateway", "stoker gateway", error)
        return 1


def parser_of() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(
        prog="stoker gateway",
        description="One address for the servers of many models: routes requests by prefix and load, through Envoy.",
        epilog="example: stoker gateway --endpoint gemma=http://10.0.0.5:8000 --endpoint gemma=http://10.0.0.6:8000",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--endpoint",
        action="append",
        type=_endpoint,
        metavar=_ENDPOINT,
        help="a server of the model with the served name NAME; repeatable, with the same NAME for further servers",
    )
    cluster_flags.add_to(parser, source)
    parser.add_argument(
        "--host", type=_host, default="127.0.0.1", help="address to listen on; :: for all (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=_port, default=8080, help="port to listen on; 0 chooses a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="file of the clients' keys, made by `stoker keys`; reloaded when it changes (default: no key needed)",
    )
    parser.add_argument(
        "--session-header",
        type=_header,
        metavar="NAME",
        help="request header whose value identifies a session, which stays with one server (default: none)",
    )
    parser.add_argument(
        "--max-body-size",
        type=_size,
        default=32 << 20,
        metavar="BYTES",
        help="maximum size of a request body; larger ones are rejected (default: %(default)s)",
    )
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=[],
        metavar="JSON",
        help='origins whose pages may use the gateway (CORS), as ["https://chat.example"] or ["*"] (default: none)',
    )
    parser.add_argument(
        "--drain-delay",
        type=_seconds,
        default=0,
        metavar="SECONDS",
        help="how long connections are still accepted after SIGTERM, while /ready answers 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=600,
        metavar="SECONDS",
        help="maximum time for active requests after SIGTERM and --drain-delay (default: %(default)s)",
    )
    parser.add_argument(
        "--picker-failure-mode",
        choices=("fail-close", "fail-open"),
        default="fail-close",
        help="while the picker fails: answer requests with 503 (fail-close), or send them to any server (fail-open, "
        "which needs a single model and no keys) (default: %(default)s)",
    )
    tls_flags.add_to(parser)
    peer_flags.add_to(parser)
    output = parser.add_argument_group("metrics and logs")
    output.add_argument(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="port of /metrics, and with --kubernetes of /scaling, on the same host; 0 chooses a free one "
        "(default: no metrics)",
    )
    output.add_argument(
        "--access-log", action="store_true", help="write a line of JSON to standard output for each completed request"
    )
    output.add_argument(
        "--billing-log",
        metavar="FILE|-",
        help="file for a line of JSON for each request that used tokens; -: standard output (default: none)",
    )
    output.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of the log on standard error (default: %(default)s)",
    )
    return parser


def _named(endpoints: list[tuple[str, str]]) -> NamedServers:
    hosts: dict[str, dict[tuple[str, int], None]] = {}
    for name, server in endpoints:
        host, _, port = server.rpartition(":")
        hosts.setdefault(name, {})[host.removeprefix("[").removesuffix("]"), int(port)] = None
    return NamedServers({name: tuple(each) for name, each in hosts.items()})


def _model_registry(servers: dict[str, tuple[str, ...]], session_header: str | None) -> ModelRegistry:
    return ModelRegistry(
        {
            name: Endpoint(name, cluster_name(name), known, session_header, created=int(time.time()))
            for name, known in servers.items()
        }
    )


def _number(text: str, minimum: int, maximum: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or not minimum <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")
    return int(text)


def _origins(text: str) -> list[str]:
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(each, str) and each for each in origins):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON list of origins, such as ["https://chat.example"]')
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin: write scheme and host, as https://chat.example"
            )
    return origins


def _port(text: str) -> int:
    return _number(text, 0, 65535)


def _size(text: str) -> int:
    return _number(text, 1, 1 << 30)


def _seconds(text: str) -> int:
    return _number(text, 0, 7 * 24 * 3600)


def _header(text: str) -> str:
    name = text.lower()
    if not _HEADER_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid header name")
    if _NO_SESSION.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot identify a session; use another header, such as X-Session-Id"
        )
    return name


def _host(text: str) -> str:
    return usable(_address(text, None))


def _endpoint(text: str) -> tuple[str, str]:
    name, _, url = text.rpartition("=")
    if not name or not name.isprintable() or name != name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not {_ENDPOINT}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {_ENDPOINT}") from None
    if parts.scheme == "https":
        raise argparse.ArgumentTypeError(f"{text!r}: TLS to servers is not supported; write http://")
    if parts.scheme != "http" or not parts.hostname or not port or "@" in parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is not {_ENDPOINT}")
    if url.rstrip("/") != f"http://{parts.netloc}":
        raise argparse.ArgumentTypeError(f"{text!r}: remove the path after the port; clients send the path")
    _address(parts.hostname, port)
    return name, netloc(parts.hostname, port)


def _address(host: str, port: int | None) -> str:
    """Return the first IP address of a host, preferably IPv4."""
    try:
        addresses = addresses_of(host, port)
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{host!r} has no address: {error}") from None
    if of_link := [each for each in addresses if "%" in each]:
        raise argparse.ArgumentTypeError(f"{host!r} has a link-local address, {of_link[0]}; use another")
    return addresses[0]
