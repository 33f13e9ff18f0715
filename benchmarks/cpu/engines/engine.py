"""What the bench asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workloads import Workload

from cpu.environments import CannotRunError
from cpu.models import Model
from cpu.workloads import Room

#: Bytes of KV cache, where an engine has to be told.
KV_CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Finished:
    """What became of a workload.

    Attributes:
        seconds: from its first request to its last token.
        counts: tokens that each request got, in order.
    """

    seconds: float
    counts: list[int]


class Running(Protocol):
    """An engine that has loaded a model."""

    version: str

    def run(self, workload: Workload) -> Finished:
        """Runs all requests, which begin together. Raises `CannotRunError` where the engine fails."""

    def close(self) -> None:
        """Ends it."""


class Engine(Protocol):
    """An engine that can be installed here."""

    name: str

    def start(self, model: Model, room: Room, cache: Path) -> Running:
        """Loads a model for what `room` says; installs the engine and converts the model first, where not done yet.

        Raises:
            CannotRunError: it cannot be installed, or does not start.
        """


def check_counts(workload: Workload, finished: Finished) -> None:
    """Raises `CannotRunError` unless every request got all of its tokens: fewer would look like speed."""
    requested = [out for _, out in workload.requests]
    if finished.counts != requested:
        wrong = [i for i, out in enumerate(requested) if i >= len(finished.counts) or finished.counts[i] != out]
        got = finished.counts[wrong[0]] if wrong and wrong[0] < len(finished.counts) else None
        raise CannotRunError(
            f"{workload.name}: {len(wrong)} of {len(requested)} requests got a wrong number of tokens, "
            f"the first of them {got} instead of {requested[wrong[0]]}"
            if wrong
            else f"{workload.name}: {len(finished.counts)} answers to {len(requested)} requests"
        )
