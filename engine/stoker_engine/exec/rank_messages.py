"""What the executor of ranks and its ranks send each other, pickled.

To a rank: `Setup` first, and `EngineArgs`; `AllLoaded`; then a `Step` at a time. To the one that answers, before the
first grammar, a `TokenTable`; then a `Prepare` for each. Between steps `LoadAdapter` and `DropAdapter`.
From it: `Progress` while it loads, then `Loaded` or `LoadFailed`; an `AdapterLoaded` for each adapter; from the one
that answers a `StepResult` for each step, and a `Prepared` for each grammar; last `Lost` or `Died`, if it can still be
said.
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
    """Who a rank is.

    Attributes:
        rank: its number.
        layout: how all of them share the model.
        rendezvous: where they find each other; see `parallel.torch_communicator.World`.
        timeout_s: seconds that it waits for another one.
        neighbours: how many ranks of all engines its machine has, and which of them it is.
        on_cpu: whether the CPU computes the model.
        region: file descriptor of the memory that it shares with those of its stage; None: they share none. See
            `parallel.shm_communicator.SharedMemory`.
        labels: what each line of its log says besides its rank.
        device: which of the accelerators that its process sees is its own, if it computes on one.
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
    """Loading gets on.

    Attributes:
        done: bytes of this rank's weights that are loaded.
        total: how many there are; 0: not known yet.
    """

    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """This rank's part of the model is loaded.

    Attributes:
        on_cpu: whether it is computed on the CPU.
    """

    plan: KVCachePlan
    on_cpu: bool


@dataclass(frozen=True)
class AllLoaded:
    """All ranks have loaded, and steps come next."""


@dataclass(frozen=True)
class Prepare:
    """Make a grammar ready, beside the steps."""

    number: int
    grammar: Grammar


@dataclass(frozen=True)
class Prepared:
    """A grammar is ready, or cannot be compiled.

    Attributes:
        number: which, as `Prepare` has it.
        error: why not; None: it can.
    """

    number: int
    error: str | None = None


@dataclass(frozen=True)
class LoadAdapter:
    """Load a LoRA adapter, beside the steps."""

    source: AdapterSource


@dataclass(frozen=True)
class AdapterLoaded:
    """An adapter is loaded, or cannot be.

    Attributes:
        error: why not; None: it is.
    """

    number: int
    loaded: LoadedAdapter | None
    error: str | None = None


@dataclass(frozen=True)
class DropAdapter:
    """Free an adapter's memory: no step that comes later uses it."""

    number: int


@dataclass(frozen=True)
class Lost:
    """A rank ends because another one did, or did not come: not the cause, but a sign of it."""

    message: str
