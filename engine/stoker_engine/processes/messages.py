"""What the two processes send each other: these, and the core's own requests and outputs, pickled.

To the engine: `EngineArgs` first; then `EngineRequest`, `Abort`, `Stop`, and before the first request with
a grammar a `TokenTable`.
From it: `WaitingForNodes` and `MissingRanks`, while it loads; then `EngineInfo` or `LoadFailed`; then
`StepOutputs`; `Died` (`stoker_common.subprocesses`) last, if it can still be said.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MissingRanks:
    """These ranks have not loaded their part of the model yet."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Abort:
    """Nobody wants a request's result any more."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """A stop string was found in the text of one sequence."""

    request_id: str
    index: int


@dataclass(frozen=True)
class WaitingForNodes:
    """Loading waits for others.

    Attributes:
        reason: which nodes it waits for, and until when; empty: it no longer waits.
    """

    reason: str
