"""Interface of the benchmarked engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workloads import Workload

from cpu.environments import CannotRunError
from cpu.models import Model
from cpu.workloads import Room

#: Size of the KV cache in bytes, for engines that need it.
KV_CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Finished:
    """Result of a workload.

    Attributes:
        seconds: from the first request to the last token.
        counts: output tokens of each request, in order.
    """

    seconds: float
    counts: list[int]


class Running(Protocol):
    """An engine with a loaded model."""

    version: str

    def run(self, workload: Workload) -> Finished:
        """Run all requests, started together. Raises `CannotRunError` if the engine fails."""

    def close(self) -> None:
        """Stop the engine."""


class Engine(Protocol):
    """An engine that can be installed on this machine."""

    name: str

    def start(self, model: Model, room: Room, cache: Path) -> Running:
        """Load a model for the limits of `room`. Install the engine and convert the model first if needed.

        Raises:
            CannotRunError: the engine cannot be installed, or does not start.
        """


def check_counts(workload: Workload, finished: Finished) -> None:
    """Raise `CannotRunError` unless every request got all of its tokens: fewer would look like speed."""
    requested = [out for _, out in workload.requests]
    if finished.counts != requested:
        wrong = [i for i, out in enumerate(requested) if i >= len(finished.counts) or finished.counts[i] != out]
        got = finished.counts[wrong[0]] if wrong and wrong[0] < len(finished.counts) else None
        raise CannotRunError(
            f"{workload.name}: {len(wrong)} of {len(requested)} requests got the wrong number of tokens, "
            f"the first of them {got} instead of {requested[wrong[0]]}"
            if wrong
            else f"{workload.name}: {len(finished.counts)} responses to {len(requested)} requests"
        )
