"""Creation of keyrings from manifests, and logging of changed keys and invalid manifests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from stoker_gateway.keys import manifests
from stoker_gateway.keys.keyring import Keyring

logger = logging.getLogger(__name__)

#: Maximum number of keys that a log line names.
_MAX_SHOWN: Final = 20
_ALL_REJECTED: Final = ", so every request is rejected until there is one"


class KeyWatch:
    """Creates keyrings from manifests, and logs the changes between them.

    Args:
        source: description of the manifests' location, for log lines.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._keyring: Keyring | None = None
        self._faults: set[str] = set()

    def keyring(self, read: Iterable[Any]) -> Keyring:
        """Return a keyring of the valid manifests, and log what has changed."""
        keyring, faults = manifests.read_all(read)
        for fault in dict.fromkeys(faults):
            if fault not in self._faults:
                logger.error("%s: an invalid key is ignored: %s", self._source, fault)
        self._faults = set(faults)
        self._log_changes(keyring)
        self._keyring = keyring
        return keyring

    def _log_changes(self, keyring: Keyring) -> None:
        if self._keyring is None:
            logger.info("%s: %d valid keys%s", self._source, len(keyring), "" if keyring.keys else _ALL_REJECTED)
            return
        before, current = self._keyring.keys, keyring.keys
        for change, ids in (
            ("added", current.keys() - before.keys()),
            ("removed", before.keys() - current.keys()),
            ("changed", {each for each in current.keys() & before.keys() if current[each] != before[each]}),
        ):
            if ids:
                shown = ", ".join(sorted(ids)[:_MAX_SHOWN]) + (", …" if len(ids) > _MAX_SHOWN else "")
                logger.info("%s: keys %s: %s", self._source, change, shown)
        if before and not current:
            logger.warning("%s: there is no valid key%s", self._source, _ALL_REJECTED)
