"""What the two processes send each other: these, and the core's own requests and outputs, pickled.

To the engine: `EngineArgs` first; then `EngineRequest`, `Abort`, `Stop`, `LoadAdapter`, `RemoveAdapter`, and before the
first request with a grammar a `TokenTable`.
From it: `WaitingForNodes` and `MissingRanks`, while it loads; then `EngineInfo` or `LoadFailed`; then
`StepOutputs`, and an `AdapterReply` for each `LoadAdapter`; `Died` (`stoker_common.subprocesses`) last, if it can still
be said.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.core.adapter import AdapterSource, LoadedAdapter


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


@dataclass(frozen=True)
class LoadAdapter:
    """Register a LoRA adapter, and load it."""

    source: AdapterSource


@dataclass(frozen=True)
class AdapterReply:
    """What became of a `LoadAdapter`.

    Attributes:
        error: why it cannot be served; None: it can.
    """

    number: int
    loaded: LoadedAdapter | None
    error: str | None


@dataclass(frozen=True)
class RemoveAdapter:
    """Take no new requests with an adapter, and drop it once those that are there have ended."""

    number: int
