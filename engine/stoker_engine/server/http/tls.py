"""Checks the TLS files before the server starts."""

from __future__ import annotations

import ssl
from typing import Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract.frontend_args import FrontendArgs

#: OpenSSL's name of its default ciphers.
DEFAULT_CIPHERS: Final = "DEFAULT"


def check_tls(args: FrontendArgs) -> None:
    """Check that the certificates and the key can be loaded, if the server uses TLS.

    Raises:
        ArgumentError: they cannot, the key is encrypted, or the ciphers are unknown.
    """
    if args.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=_refuse_encrypted)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
        context.set_ciphers(args.ssl_ciphers or DEFAULT_CIPHERS)
    except OSError as error:  # including ssl.SSLError
        raise ArgumentError(
            "--ssl-certfile", f"cannot load {args.ssl_certfile} with its key, certificates and ciphers: {error}"
        ) from error


def _refuse_encrypted() -> str:
    """Called for the password of an encrypted key; otherwise OpenSSL would ask for it on the terminal."""
    raise ArgumentError("--ssl-keyfile", "the key is encrypted; store it without a password (openssl pkey)")
