"""The files that Envoy watches, always whole: it sees a file that was moved into its place.

Clusters come after the file of their servers, and go before it: at any time each cluster that Envoy knows has one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker_gateway.directory import Directory
from stoker_gateway.envoy import config
from stoker_gateway.envoy.settings import EnvoySettings


class EnvoyFiles:
    """Writes what changes."""

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings
        self._written: dict[Path, Any] = {}
        (settings.folder / "servers").mkdir(exist_ok=True)

    def write(self, directory: Directory) -> None:
        """Has Envoy know this directory, and nothing of an earlier one.

        Raises:
            OSError: a file cannot be written; what Envoy knows is one of the two directories, or between them.
        """
        settings = self._settings
        named = {settings.servers_file(endpoint.cluster): endpoint for endpoint in directory.endpoints.values()}
        for path, endpoint in named.items():
            self._replace(path, config.servers(endpoint))
        self._replace(settings.clusters_file, config.clusters(directory, settings))
        for path in self._written.keys() - named.keys() - {settings.clusters_file}:
            path.unlink(missing_ok=True)
            del self._written[path]

    def _replace(self, path: Path, content: Any) -> None:
        if self._written.get(path) == content:
            return
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(json.dumps(content), encoding="utf-8")
        beside.replace(path)
        self._written[path] = content
