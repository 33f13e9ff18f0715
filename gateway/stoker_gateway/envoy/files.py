"""The configuration files that Envoy watches. They are replaced atomically by renaming.

A cluster's servers file is written before the cluster is added to the clusters file, and deleted after the cluster is
removed from it, so each cluster in the clusters file has a servers file. Each file has a version, a digest of its
content. Envoy's statistics report the last versions of the clusters and servers files that it has applied.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stoker_gateway.envoy import clusters, listener
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.registry.model_registry import ModelRegistry

_CLUSTERS: Final = "cluster_manager.cds.version_text"


class EnvoyFiles:
    """Writes Envoy's configuration files. Unchanged files are not rewritten."""

    #: Path of the version statistics in Envoy's admin interface.
    versions_path: Final = "/stats?type=TextReadouts&filter=version_text$"

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings
        self._written: dict[Path, Any] = {}
        self._versions: dict[str, str] = {}
        (settings.folder / "servers").mkdir(exist_ok=True)
        if settings.tls is not None:
            _replace(settings.certificate_file, listener.certificate(settings.tls))

    def write(self, model_registry: ModelRegistry, *earlier: ModelRegistry) -> None:
        """Write the clusters and servers files, and delete the servers files of removed clusters.

        Args:
            model_registry, earlier: their clusters and servers are written.

        Raises:
            OSError: a file cannot be written or deleted; other files may have been updated.
        """
        settings = self._settings
        known = _all(model_registry, *earlier)
        named = {settings.servers_file(endpoint.cluster): endpoint for endpoint in known.endpoints.values()}
        for path, endpoint in named.items():
            if self._written.get(path) != endpoint.servers:
                self._versions[_servers_version(endpoint.cluster)] = _replace(path, clusters.servers(endpoint))
                self._written[path] = endpoint.servers
        names = {name: endpoint.cluster for name, endpoint in known.endpoints.items()}
        if self._written.get(settings.clusters_file) != names:
            self._versions[_CLUSTERS] = _replace(settings.clusters_file, clusters.clusters(known, settings))
            self._written[settings.clusters_file] = names
        for path in self._written.keys() - named.keys() - {settings.clusters_file}:
            path.unlink(missing_ok=True)
            del self._written[path]
            self._versions.pop(_servers_version(path.stem), None)

    def unread(self, response: str) -> set[str]:
        """Return the names of the version statistics that differ from the versions last written.

        Args:
            response: response of Envoy's admin interface to `versions_path`.
        """
        lines = (line.partition(": ") for line in response.split("\n"))
        read = {name: version.strip().strip('"') for name, _, version in lines}
        return {name for name, version in self._versions.items() if read.get(name) != version}


def _all(model_registry: ModelRegistry, *earlier: ModelRegistry) -> ModelRegistry:
    """Return a registry with the models and servers of all given registries."""
    known = dict(model_registry.endpoints)
    for each in earlier:
        for name, endpoint in each.endpoints.items():
            before = known.setdefault(name, endpoint)
            if before.servers != endpoint.servers:
                known[name] = replace(before, servers=tuple(dict.fromkeys((*before.servers, *endpoint.servers))))
    return ModelRegistry(known)


def _servers_version(cluster: str) -> str:
    return f"cluster.{cluster}.version_text"


def _replace(path: Path, content: Any) -> str:
    """Write a file atomically, and return its version."""
    text = json.dumps(content)
    version = hashlib.sha256(text.encode()).hexdigest()[:16]
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(
        f'{{"version_info": "{version}", {text[1:]}', encoding="utf-8"
    )  # avoids serialising a large file twice
    beside.replace(path)
    return version
