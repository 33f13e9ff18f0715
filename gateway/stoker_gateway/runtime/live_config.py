"""The live configuration: applies a model registry to Envoy, the picker and the poller.

The picker should choose only servers that Envoy knows. So a change first adds new models and servers to Envoy's files,
and waits until Envoy's statistics confirm that it has read them. Then the picker adopts the new registry. After the
maximum time in which earlier decisions reach Envoy, removed models and servers are deleted from Envoy's files. Active
requests to a removed server continue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from stoker_gateway.envoy.admin import EnvoyAdmin
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.errors import GatewayError
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.polling.poller import PollResult
from stoker_gateway.polling.server_watch import ServerWatch
from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.runtime.listeners import listener
from stoker_gateway.scheduling.in_flight import ON_THE_WAY_S
from stoker_gateway.scheduling.picker import EndpointPicker

logger = logging.getLogger(__name__)

#: Interval of checks whether Envoy has read its files, and timeout of this wait, in seconds.
_CHECK_INTERVAL_S: Final = 0.02
_READ_S: Final = 10.0
_ON_THE_WAY_S: Final = ON_THE_WAY_S
#: Maximum number of names in a log line.
_MAX_SHOWN: Final = 20


class LiveConfig:
    """Applies model registries to Envoy, the picker and the poller. Used in one event loop.

    Args:
        files: Envoy's configuration files.
        envoy: Envoy's admin interface.
        picker: the picker's server.
        identity: unique name of this process.
    """

    def __init__(self, files: EnvoyFiles, envoy: EnvoyAdmin, picker: PickerServer, identity: str) -> None:
        self._files = files
        self._envoy = envoy
        self._picker = picker
        self._identity = identity
        self._watch = ServerWatch()
        self._notify_pickers: Callable[[PollResult], None] = lambda _: None
        self._set_servers: Callable[[Iterable[str]], None] = lambda _: None
        self._set_authorizations: Callable[[Mapping[str, tuple[str, ...]]], None] = lambda _: None
        self._departing: dict[float, ModelRegistry] = {}
        self.model_registry = self._next = ModelRegistry()
        #: Pickers by served name.
        self.pickers: dict[str, EndpointPicker] = {}

    def attach_poller(
        self,
        set_servers: Callable[[Iterable[str]], None],
        set_authorizations: Callable[[Mapping[str, tuple[str, ...]]], None] = lambda _: None,
    ) -> None:
        """Set the poller's setters for the servers and for the ``Authorization`` candidates of each, and call them with
        the current values."""
        self._set_servers, self._set_authorizations = set_servers, set_authorizations
        set_authorizations(_authorizations(self.model_registry))
        set_servers(_servers(self.model_registry))

    def on_poll_result(self, result: PollResult) -> None:
        """Pass the result of a poll to the server watch and the pickers."""
        self._watch.record(result)
        self._notify_pickers(result)

    def any_lost(self) -> bool:
        """Return whether any model has servers, but none that is ready."""
        return any(
            self.model_registry.endpoints[name].servers and not each.num_ready for name, each in self.pickers.items()
        )

    def begin(self, model_registry: ModelRegistry) -> None:
        """Apply the first registry without waiting for Envoy, which may not have started yet.

        Raises:
            OSError: a file cannot be written.
        """
        self._next = model_registry
        self._files.write(model_registry)
        self._adopt(model_registry)

    async def change(self, model_registry: ModelRegistry) -> None:
        """Apply a new registry in place of the current one.

        Raises:
            OSError: a file cannot be written.
        """
        before, self._next = self.model_registry, model_registry
        self._write()
        await self._until_read()
        self._adopt(model_registry)
        left_at = time.monotonic()
        self._departing[left_at] = before
        asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._forget, left_at)
        _log_changes(before, model_registry)

    def _write(self) -> None:
        self._files.write(self._next, self.model_registry, *self._departing.values())

    def _forget(self, left_at: float) -> None:
        """Delete from Envoy's files the models and servers that only the registry replaced at `left_at` has."""
        del self._departing[left_at]
        try:
            self._write()
        except OSError as error:
            logger.error("removed models or servers cannot be deleted from Envoy's configuration: %s", error)

    async def _until_read(self) -> None:
        """Wait until Envoy has read the files; after a timeout, log an error and continue."""
        deadline = time.monotonic() + _READ_S
        while True:
            try:
                waits = self._files.unread(await self._envoy.request("GET", self._files.versions_path))
            except GatewayError as error:
                waits = {str(error)}
            if not waits:
                return
            if time.monotonic() > deadline:
                shown = ", ".join(sorted(waits)[:_MAX_SHOWN])
                logger.error(
                    "Envoy has not confirmed its new files within %g s and may reject requests; unconfirmed: %s",
                    _READ_S,
                    shown,
                )
                return
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _adopt(self, model_registry: ModelRegistry) -> None:
        now = time.monotonic()
        for name in self.pickers.keys() - model_registry.endpoints.keys():
            del self.pickers[name]
        for name, endpoint in model_registry.endpoints.items():
            if name not in self.pickers:
                self.pickers[name] = EndpointPicker(identity=self._identity)
            self.pickers[name].careful = endpoint.scaling is not None
            known = self.model_registry.endpoints.get(name)
            if known is None or known.servers != endpoint.servers:
                self.pickers[name].set_servers(endpoint.servers, now)
        self.model_registry = model_registry
        self._watch.set_model_registry(model_registry)
        self._notify_pickers = listener(model_registry, self.pickers, self._picker.wake)
        self._picker.update(model_registry, self.pickers)
        self._set_authorizations(_authorizations(model_registry))
        self._set_servers(_servers(model_registry))
        for name in model_registry.endpoints:
            self._picker.wake(name)


def _authorizations(model_registry: ModelRegistry) -> dict[str, tuple[str, ...]]:
    authorizations: dict[str, dict[str, None]] = {}
    for endpoint in model_registry.endpoints.values():
        for server in endpoint.servers:
            authorizations.setdefault(server, {}).update(dict.fromkeys(endpoint.authorizations))
    return {server: tuple(each) for server, each in authorizations.items()}


def _servers(model_registry: ModelRegistry) -> list[str]:
    return list(dict.fromkeys(server for endpoint in model_registry.endpoints.values() for server in endpoint.servers))


def describe(model_registry: ModelRegistry) -> str:
    """Return a registry's first models with their numbers of servers, for a log line."""
    counts = {name: len(endpoint.servers) for name, endpoint in model_registry.endpoints.items()}
    shown = [f"{name} ({count} server{'s' * (count != 1)})" for name, count in list(counts.items())[:_MAX_SHOWN]]
    return ", ".join(shown + ["…"] * (len(counts) > _MAX_SHOWN)) or "no model"


def _log_changes(before: ModelRegistry, after: ModelRegistry) -> None:
    for change, names in (
        ("served from now on", after.endpoints.keys() - before.endpoints.keys()),
        ("no longer served", before.endpoints.keys() - after.endpoints.keys()),
        (
            "servers changed",
            {
                name
                for name in after.endpoints.keys() & before.endpoints.keys()
                if after.endpoints[name].servers != before.endpoints[name].servers
            },
        ),
    ):
        if names:
            source = before if change == "no longer served" else after
            logger.info(
                "%s: %s", change, describe(ModelRegistry({name: source.endpoints[name] for name in sorted(names)}))
            )
