"""What goes wrong with keys.

StokerError
├── KeyManifestError    a manifest, or a file of them, does not say a key
└── RequestError
    └── UnauthorizedError   no key that holds came with the request         HTTP 401
"""

from __future__ import annotations

from stoker_engine.contract.errors import RequestError, StokerError


class KeyManifestError(StokerError):
    """A manifest, or a file of them, does not say a key."""


class UnauthorizedError(RequestError):
    """No key that holds came with the request.

    Args:
        message: what is wrong, and the remedy.
    """

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")
