"""Logging of changes of the servers' states."""

from __future__ import annotations

import logging
from typing import Literal

from stoker_gateway.polling.poller import PollResult
from stoker_gateway.registry.model_registry import ModelRegistry

logger = logging.getLogger(__name__)

State = Literal["ready", "reports no load", "is not ready", "does not answer"]


class ServerWatch:
    """Logs once when a server is not ready or does not answer, is back, or reports no load."""

    def __init__(self, model_registry: ModelRegistry | None = None) -> None:
        self._models: dict[str, list[str]] = {}
        self._states: dict[str, State] = {}
        #: Servers of endpoints with scaling. The registry lists them before they have started, so their states are not
        #: logged before they have been ready.
        self._may_start: set[str] = set()
        self.set_model_registry(model_registry or ModelRegistry())

    def set_model_registry(self, model_registry: ModelRegistry) -> None:
        """Set the models and their servers."""
        self._models = {}
        self._may_start = set()
        for name, endpoint in model_registry.endpoints.items():
            for server in endpoint.servers:
                self._models.setdefault(server, []).append(name)
            if endpoint.scaling is not None:
                self._may_start.update(endpoint.servers)
        for departed in self._states.keys() - self._models.keys():
            del self._states[departed]

    def record(self, result: PollResult) -> None:
        """Log the change of a server's state that the result of a poll shows, if any."""
        if result.load is None or result.server not in self._models:
            return  # the server is not lost yet, or was removed
        state: State = "ready"
        if not result.load.ready:
            state = "is not ready" if result.answered else "does not answer"
        elif not result.load.counted:
            state = "reports no load"
        starts = result.server in self._may_start and result.server not in self._states
        previous = self._states.get(result.server, "ready")
        if starts and not result.load.ready:
            return  # the server may still be starting
        self._states[result.server] = state
        if state == previous:
            return
        description = f"{result.server} ({', '.join(self._models[result.server])})"
        if state == "is not ready" or state == "does not answer":
            logger.warning("%s %s: the server gets no requests until it is ready again", description, state)
        elif previous == "is not ready" or previous == "does not answer":
            logger.info("%s is back", description)
        if state == "reports no load":
            logger.warning(
                "%s has no metrics with vLLM's names: the gateway estimates its load from the requests sent to it",
                description,
            )
