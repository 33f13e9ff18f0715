"""``stoker gateway``: one address before the servers of many models."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import socket
import sys
from urllib.parse import urlsplit

from stoker_gateway.directory import Directory, Endpoint


def main(argv: list[str]) -> int:
    """Runs until SIGTERM or SIGINT; 1: Envoy cannot serve, 2: a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="stoker gateway", description="One address before the servers of many models."
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        type=_endpoint,
        metavar="NAME=http://HOST:PORT",
        help="a server of a model; repeatable, also with the same name",
    )
    parser.add_argument("--host", default="127.0.0.1", help="IP address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_count, default=8080, help="port; 0: a free one (default: %(default)s)")
    parser.add_argument(
        "--max-body-size", type=_count, default=32 << 20, metavar="BYTES", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--drain-timeout",
        type=_count,
        default=600,
        metavar="SECONDS",
        help="how long requests under way may take after SIGTERM (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    from stoker_gateway import process
    from stoker_gateway.errors import GatewayError

    servers: dict[str, dict[str, None]] = {}
    for name, server in options.endpoint:
        servers.setdefault(name, {})[server] = None
    endpoints = {name: Endpoint(name, _cluster(name), tuple(known)) for name, known in servers.items()}
    work = process.run(Directory(endpoints), options.host, options.port, options.max_body_size, options.drain_timeout)
    try:
        asyncio.run(work)
    except (GatewayError, OSError) as error:
        print(f"stoker gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _cluster(name: str) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', name.lower())[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def _endpoint(text: str) -> tuple[str, str]:
    name, _, url = text.rpartition("=")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT") from None
    if (
        not name
        or parts.scheme != "http"
        or not parts.hostname
        or not port
        or url.rstrip("/") != f"http://{parts.netloc}"
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    try:
        host = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{parts.hostname} has no address: {error}") from None
    return name, f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
