"""Where keys are kept, for who makes and revokes them: a file, or a cluster's namespace."""

from __future__ import annotations

from typing import Protocol

from stoker_gateway.keys.manifests import Manifest


class KeyStore(Protocol):
    """Where keys are kept.

    Each method raises `KeyStoreError` where that cannot be reached, read or written.
    """

    def read(self) -> list[Manifest]:
        """The manifests of all keys, whatever they say."""

    def create(self, manifest: Manifest) -> None:
        """Adds a key.

        Raises:
            ArgumentError: there is one of its id.
        """

    def delete(self, key_id: str) -> None:
        """Takes a key out.

        Raises:
            ArgumentError: there is none of that id.
        """
