"""What the operator is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """How the operator runs.

    Attributes:
        namespaces: those it looks after; none means all of them.
        resync_seconds: how often every endpoint is looked at again, whatever happened or did not.
        recheck_seconds: how soon an endpoint is looked at again that is not ready yet; up to sixteen times that while
            nothing happens. Events tell most of it, but not why pods do not start.
        backoff_seconds: the first pause after an error; it doubles up to `resync_seconds`.
        catalogue: a file that extends and overrides the built-in accelerator catalogue.
        health_address: where ``/healthz`` answers, as HOST:PORT.
    """

    namespaces: tuple[str, ...] = ()
    resync_seconds: float = 600
    recheck_seconds: float = 2
    backoff_seconds: float = 1
    catalogue: Path | None = None
    health_address: str = "0.0.0.0:8080"
