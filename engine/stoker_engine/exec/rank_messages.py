"""Messages between the executor and its ranks, pickled.

To a rank: first `Setup` and `EngineArgs`; `AllLoaded`; then `Step`s, and between them `LoadAdapter` and `DropAdapter`.
On a CPU each `Step` is run at once. On accelerators it is launched, and a `Collect` follows, maybe after the next one.
To the answering rank only: a `TokenTable` before the first grammar, then a `Prepare` for each grammar.
From a rank: `Progress` while it loads, then `Loaded` or `LoadFailed`; an `AdapterLoaded` for each `LoadAdapter`; after
a fatal error `Lost` or `Died`, if it can still send. From the answering rank only: a `StepResult` for each step, and a
`Prepared` for each grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.grammar import Grammar
from stoker_engine.parallel.layout import RankLayout

if TYPE_CHECKING:
    from stoker_engine.exec.kv_cache import KVCachePlan


@dataclass(frozen=True)
class Setup:
    """Identity and settings of a rank.

    Attributes:
        rank: its index in the engine.
        layout: how the ranks split the model.
        rendezvous: URL at which the ranks find each other; see `parallel.torch_communicator.World`.
        timeout_s: how long the rank waits for another rank, in seconds.
        neighbours: number of ranks of all engines on the rank's machine, and the rank's index among them.
        on_cpu: whether the model runs on the CPU.
        region: file descriptor of the memory shared with the ranks of its stage; None: none. See
            `parallel.shm_communicator.SharedMemory`.
        labels: fields of the rank's log lines besides its rank.
        device: index of its accelerator among the accelerators that are visible to its process.
    """

    rank: int
    layout: RankLayout
    rendezvous: str
    timeout_s: float
    neighbours: tuple[int, int]
    on_cpu: bool
    region: int | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    device: int = 0


@dataclass(frozen=True)
class Progress:
    """Progress of loading.

    Attributes:
        done: loaded bytes of this rank's weights.
        total: bytes of this rank's weights; 0: not known yet.
    """

    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """The sending rank has loaded its part of the model.

    Attributes:
        on_cpu: whether the model runs on the CPU.
    """

    plan: KVCachePlan
    on_cpu: bool


@dataclass(frozen=True)
class AllLoaded:
    """All ranks have loaded; steps follow."""


@dataclass(frozen=True)
class Collect:
    """Collect the oldest step in flight.

    All ranks get it at the same place among the steps, since what they communicate in a step depends on which of the
    previous ones they have collected (`finish.sample`).
    """


@dataclass(frozen=True)
class Prepare:
    """Compile a grammar, concurrently with the steps."""

    number: int
    grammar: Grammar


@dataclass(frozen=True)
class Prepared:
    """A grammar was compiled, or failed to compile.

    Attributes:
        error: error message; None: it was compiled.
    """

    number: int
    error: str | None = None


@dataclass(frozen=True)
class LoadAdapter:
    """Load a LoRA adapter, concurrently with the steps."""

    source: AdapterSource


@dataclass(frozen=True)
class AdapterLoaded:
    """An adapter was loaded, or failed to load.

    Attributes:
        error: error message; None: it was loaded.
    """

    number: int
    loaded: LoadedAdapter | None
    error: str | None = None


@dataclass(frozen=True)
class DropAdapter:
    """Free an adapter's memory; no later step uses it."""

    number: int


@dataclass(frozen=True)
class Lost:
    """A rank ends because another rank ended or did not respond, so this message does not report the first cause."""

    message: str
