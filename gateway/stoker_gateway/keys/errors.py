"""Errors about keys.

StokerError
├── KeyManifestError    a manifest, or a file of manifests, is invalid
├── KeyStoreError       the store of keys cannot be reached, read or written        CLI: exit 1
└── RequestError
    └── UnauthorizedError   the request has no valid key                            HTTP 401
"""

from __future__ import annotations

from stoker_common.errors import ArgumentError, RequestError, StokerError


class KeyManifestError(StokerError):
    """A manifest of a key, or a file of manifests, is invalid."""


class KeyStoreError(StokerError):
    """The store of keys cannot be reached, read or written."""


class UnauthorizedError(RequestError):
    """The request has no valid key.

    Args:
        message: the cause and the remedy.
    """

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


def taken(key_id: str) -> ArgumentError:
    """Return the error for an id that already exists."""
    return ArgumentError("--id", f"the key {key_id!r} already exists; choose another id, or revoke that key first")


def absent(key_id: str) -> ArgumentError:
    """Return the error for an id that does not exist."""
    return ArgumentError("ID", f"there is no key {key_id!r}; `stoker keys list` shows the existing keys")
