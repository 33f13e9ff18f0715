"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path, password: str | None = None) -> tuple[Path, Path]:
    """Create a key, which is encrypted if there is a password, and its self-signed certificate for this machine."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-days", "1"),
            *(["-nodes"] if password is None else ["-passout", f"pass:{password}"]),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate
