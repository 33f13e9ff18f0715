"""What goes wrong with keys.

StokerError
├── KeyManifestError    a manifest, or a file of them, does not say a key
├── KeyStoreError       where keys are kept cannot be reached, read or written      CLI: exit 1
└── RequestError
    └── UnauthorizedError   no key that holds came with the request                 HTTP 401
"""

from __future__ import annotations

from stoker_common.errors import ArgumentError, RequestError, StokerError


class KeyManifestError(StokerError):
    """A manifest, or a file of them, does not say a key."""


class KeyStoreError(StokerError):
    """Where keys are kept cannot be reached, read or written."""


class UnauthorizedError(RequestError):
    """No key that holds came with the request.

    Args:
        message: what is wrong, and the remedy.
    """

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


def taken(key_id: str) -> ArgumentError:
    """There is a key of this id already."""
    return ArgumentError("--id", f"the key {key_id!r} already exists; choose another id, or revoke that key first")


def absent(key_id: str) -> ArgumentError:
    """There is no key of this id."""
    return ArgumentError("ID", f"there is no key {key_id!r}; `stoker keys list` shows the existing keys")
