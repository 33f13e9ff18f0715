"""What every route works with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from stoker_engine.contract.errors import NotFoundError
from stoker_engine.server.engine_client import EngineClient


@dataclass(frozen=True)
class Service:
    """One model, served.

    Attributes:
        model_names: the names it answers to; the first is reported.
        root: where the model came from, as the user said it.
        created: when it began to be served, in Unix seconds.
    """

    client: EngineClient
    model_names: Sequence[str]
    root: str
    registry: CollectorRegistry
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that responses and metrics carry."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out, but not name another one.

        Raises:
            NotFoundError: the model is not served here.
        """
        if name is not None and name not in self.model_names:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; there is {', '.join(self.model_names)}",
                "model",
                "model_not_found",
            )
