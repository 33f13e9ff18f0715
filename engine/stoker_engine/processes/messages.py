"""Messages between the server and the engine process, besides the core's own requests and outputs; pickled.

To the engine: `EngineArgs` first; then `EngineRequest`, `Abort`, `Stop`, `LoadAdapter`, `RemoveAdapter`, and a
`TokenTable` before the first request with a grammar. If the server has several front ends, they send `EngineRequest`,
`Abort` and `Stop`, once the server has sent `ServeFrontEnds`, and each receives the deltas of its requests.
From the engine: `WaitingForNodes` and `MissingRanks` while it loads; then `EngineInfo` or `LoadFailed`; then
`StepOutputs`, and an `AdapterReply` for each `LoadAdapter`; after a fatal error `Died` (`stoker_common.subprocesses`),
if it can still send.
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
    """Abort a request whose result is not needed any more."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """End the sequence with this index in its request, because its text contains a stop string."""

    request_id: str
    index: int


@dataclass(frozen=True)
class WaitingForNodes:
    """Loading waits for other nodes.

    Attributes:
        reason: which nodes it waits for, and until when; empty: the wait is over.
    """

    reason: str


@dataclass(frozen=True)
class LoadAdapter:
    """Register a LoRA adapter, and load it."""

    source: AdapterSource


@dataclass(frozen=True)
class AdapterReply:
    """Result of a `LoadAdapter`.

    Attributes:
        error: error message; None: the adapter was loaded.
    """

    number: int
    loaded: LoadedAdapter | None
    error: str | None


@dataclass(frozen=True)
class RemoveAdapter:
    """Refuse new requests for an adapter, and drop it once its current requests have ended."""

    number: int


@dataclass(frozen=True)
class ServeFrontEnds:
    """Let several front ends send requests: the engine sends them its `EngineInfo`."""
