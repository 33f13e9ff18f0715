"""Interface of the stores in which keys are created and revoked: a file, or a namespace of a cluster."""

from __future__ import annotations

from typing import Protocol

from stoker_gateway.keys.manifests import Manifest


class KeyStore(Protocol):
    """Store of keys.

    Each method raises `KeyStoreError` or `ArgumentError` if the store cannot be reached, read or written.
    """

    def read(self) -> list[Manifest]:
        """Return all manifests of keys, including invalid ones."""

    def create(self, manifest: Manifest) -> None:
        """Add a key.

        Raises:
            ArgumentError: a key with its id exists.
        """

    def delete(self, key_id: str) -> None:
        """Remove a key.

        Raises:
            ArgumentError: there is no key with this id.
        """
