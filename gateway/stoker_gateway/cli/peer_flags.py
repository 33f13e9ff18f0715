"""Flags of ``stoker gateway`` for sharing the keys' limits with other replicas."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stoker_gateway.limits.peer_settings import PeerSettings

#: Minimum number of characters of the token.
_MIN_TOKEN_CHARS: Final = 16


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    peers = parser.add_argument_group("other replicas, which share the keys' limits")
    peers.add_argument(
        "--peer",
        action="append",
        default=[],
        type=address,
        metavar="HOST:PORT",
        help="address at which another replica listens for its peers; repeatable (default: none)",
    )
    peers.add_argument(
        "--peer-service",
        type=address,
        metavar="HOST:PORT",
        help="name that resolves to the addresses of all replicas, such as a headless Service; resolved every second",
    )
    peers.add_argument(
        "--peer-listen", type=address, metavar="HOST:PORT", help="listening address for other replicas (default: none)"
    )
    peers.add_argument(
        "--peer-token-file", type=Path, metavar="FILE", help="file with a secret, the same for all replicas"
    )


def settings_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> PeerSettings | None:
    """Return the settings from the flags; None if no flag is set. Exit the process if the combination or the token file
    is invalid."""
    flags: dict[str, object] = {
        "--peer": options.peer,
        "--peer-service": options.peer_service,
        "--peer-listen": options.peer_listen,
        "--peer-token-file": options.peer_token_file,
    }
    if not any(flags.values()):
        return None
    for flag in ("--peer-listen", "--peer-token-file"):
        if not flags[flag]:
            parser.error(f"{flag} is missing: the flags --peer-… need both --peer-listen and --peer-token-file")
    if options.peer and options.peer_service:
        parser.error("argument --peer-service: not allowed with --peer; leave out --peer")
    from stoker_gateway.limits.peer_settings import PeerSettings

    token = _token(parser, options.peer_token_file)
    return PeerSettings(options.peer_listen, token, tuple(dict.fromkeys(options.peer)), options.peer_service)


def _token(parser: argparse.ArgumentParser, path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"argument --peer-token-file: {path} cannot be read: {error}")
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        parser.error(
            f"argument --peer-token-file: {path} must contain a single token of at least {_MIN_TOKEN_CHARS} ASCII "
            "characters, such as the output of `openssl rand -hex 32`"
        )
    return token


def address(text: str) -> str:
    """Check and return a flag's ``HOST:PORT``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or any(each.isspace() or each in "/@," for each in host):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise argparse.ArgumentTypeError(f"{text!r}: write the IPv6 address as [ADDRESS]:PORT")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} has no port from 1 to 65535")
    return text
