"""Flags of ``stoker gateway`` for TLS."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_gateway.envoy.settings import TLSFiles


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    tls = parser.add_argument_group("TLS; without it, connections are not encrypted")
    tls.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate in PEM, with its intermediate certificates"
    )
    tls.add_argument(
        "--tls-key",
        type=Path,
        metavar="FILE",
        help="private key of the certificate, in PEM; both files are reloaded when they are replaced by a move, as in a "
        "mounted Secret",
    )


def files_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> TLSFiles | None:
    """Return the files from the flags; None if no flag is set. Missing or invalid files exit the process."""
    if options.tls_cert is None and options.tls_key is None:
        return None
    for flag, path in (("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key)):
        if path is None:
            parser.error(f"{flag} is missing: TLS needs --tls-cert and --tls-key")
        try:
            path.read_bytes()
        except OSError as error:
            parser.error(f"argument {flag}: {path} cannot be read: {error.strerror}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        parser.error(
            f"argument --tls-key: {options.tls_cert} and {options.tls_key} are not a certificate and its key in PEM, "
            f"without a password: {reason}"
        )
    from stoker_gateway.envoy.settings import TLSFiles

    return TLSFiles(options.tls_cert.absolute(), options.tls_key.absolute())
