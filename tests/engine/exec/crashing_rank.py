"""A rank that dies at scripted points. Run as ``crashing_rank.py DEATHS …``, with `rank_main`'s arguments.

Real: the rank's main loop and pipe. Faked: the model, and the communication of ranks; torch is not imported, so that a
start takes a fraction of a second. DEATHS is a folder; a file ``POINT-RANK`` in it contains how that rank dies there:

    start   before anything is received           N            by signal N (19: it is only stopped)
    load    while the model is loaded             raise        by an exception of its own
    step    in its third step, before all others  memory       by a MemoryError
            wait for it                           argument, model   by what loading may raise
    after   when all have met in that step        exit         without a message
                                                  hang         does not die, but hangs
                                                  half         with half of a message in the pipe
                                                  unpicklable, junk   with a result that cannot be sent, or read

An adapter's files are a folder of DEATHS: ``content`` is its digest, ``content-RANK`` that of one rank, and
``wrong-RANK`` its error there; loads wait until one exists. ``dropped-RANK`` lists dropped adapters.

If DEATHS has a file ``accelerator``, ranks launch and collect steps, and write both to ``calls-RANK``.

A rank with a file ``late-RANK`` starts that many seconds later. A grammar's compilation ends once DEATHS has a file
named like its source, whose text is the error.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker_common.errors import AdapterError, ArgumentError, WeightsError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Sampled, Step, StepResult
from stoker_engine.parallel.layout import RankLayout

DEATHS, RANK, PIPE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Junk:
    """An object of a module that other processes lack, so that it cannot be unpickled."""


def come_to(point: str) -> str | None:
    """Die, if a death is planned here; return ways to die that the caller must carry out."""
    file = DEATHS / f"{point}-{RANK}"
    if not file.exists():
        return None
    how = file.read_text()
    if how.isdigit():
        os.kill(os.getpid(), int(how))
    match how:
        case "raise":
            raise ZeroDivisionError("a planned death")
        case "memory":
            raise MemoryError
        case "argument":
            raise ArgumentError("--dtype", "a planned refusal; choose another")
        case "model":
            raise WeightsError("a planned lack of weights")
        case "exit":
            os._exit(3)
        case "hang":
            signal.pause()
        case "half":
            os.write(PIPE, struct.pack("!i", 1000) + b"half")
            os._exit(3)
    return how


class RankLostError(RuntimeError):
    pass


class Joined:
    """Ranks that meet by the file of their rendezvous: each writes there how often it has arrived."""

    def __init__(self, rank: int, layout: RankLayout, rendezvous: str, timeout_s: float, shared: object) -> None:
        assert (shared is None) == rendezvous.startswith("tcp:")  # ranks of several nodes share no memory
        self.rank, self.size, self._timeout_s, self._met = rank, layout.size, timeout_s, 0
        self.groups = self
        path = DEATHS / "meeting" if rendezvous.startswith("tcp:") else rendezvous.removeprefix("file://")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.meet()

    def meet(self) -> None:
        self._met += 1
        os.pwrite(self._file, struct.pack("q", self._met), 8 * self.rank)
        deadline = time.monotonic() + self._timeout_s
        while any(self._came(rank) < self._met for rank in range(self.size)):
            if time.monotonic() > deadline:  # simulates the communicator's timeout
                break
            time.sleep(0.001)  # sleeps: ranks that wait for each other by looking
        else:
            return
        raise RankLostError(f"rank {self.rank} did not hear from rank 0")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._file)

    def _came(self, rank: int) -> int:
        return int.from_bytes(os.pread(self._file, 8, 8 * rank), sys.byteorder)


class Grammars:
    """Compiles as many at a time as there are."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(64)

    def prepare(self, grammar: Grammar) -> Future[object]:
        return self._threads.submit(self._compile, DEATHS / grammar.source)

    def _compile(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.001)  # sleeps: compiles until a test lets it end
        if words := file.read_text():
            raise ValueError(words)


class Adapters:
    """Adapters whose content is given by files."""

    def __init__(self) -> None:
        self.active: dict[int, int] = {}
        self._loaded: set[int] = set()

    def load(self, source: AdapterSource) -> LoadedAdapter:
        folder = DEATHS / source.path
        while True:
            if (wrong := folder / f"wrong-{RANK}").exists():
                raise AdapterError(wrong.read_text())
            for file in (folder / f"content-{RANK}", folder / "content"):
                if file.exists():
                    self._loaded.add(source.number)
                    return LoadedAdapter(file.read_text(), 8, 100, float(RANK))
            time.sleep(0.001)  # sleeps: reading until a test lets it end

    def drop(self, number: int) -> None:
        self._loaded.remove(number)
        with (DEATHS / f"dropped-{RANK}").open("a") as file:
            file.write(f"{number} ")

    def activate(self, slot: int, number: int) -> None:
        assert number in self._loaded
        self.active[slot] = number


class Runner:
    """Returns the numbers of the steps so far, and its number of threads."""

    def __init__(self, args: Any, checkpoint: Any, on_progress: Callable[[int, int], None], ranks: Joined) -> None:
        self._ranks, self._steps = ranks, list[int]()
        self._launched = deque[Step]()
        self.device = types.SimpleNamespace(type="cuda" if (DEATHS / "accelerator").exists() else "cpu")
        self.grammars = Grammars()
        self.adapters = Adapters()
        for done in range(4):
            time.sleep(0.1)  # sleeps: reading weights takes time
            on_progress(done * 10**RANK, 3 * 10**RANK)
        come_to("load")
        self.plan = types.SimpleNamespace(num_blocks=7, model=args.model, threads=THREADS)

    def launch(self, step: Step) -> None:
        self._note(f"launch {step.number}")
        self._launched.append(step)

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        self._note(f"collect {step.number}")
        return self.run(step)

    def _note(self, call: str) -> None:
        with (DEATHS / f"calls-{RANK}").open("a") as file:
            file.write(f"{call}\n")

    def run(self, step: Step) -> StepResult:
        self._steps.append(step.number)
        for slot, number in step.adapters:
            self.adapters.activate(slot, number)
        how = come_to("step") if len(self._steps) == 3 else None
        self._ranks.meet()
        if len(self._steps) == 3:
            how = come_to("after") or how
        if how == "unpicklable":
            return StepResult([lambda: None])  # type: ignore[list-item]
        if how == "junk":
            return StepResult([Junk()])  # type: ignore[list-item]
        return StepResult([Sampled([list(self._steps)])])


def _fake_module(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


THREADS: list[int] = []
_fake_module("stoker_engine.exec.build_runner", build_runner=Runner)
_fake_module("stoker_engine.parallel.join", join=Joined)
_fake_module("stoker_engine.parallel.communicator", RankLostError=RankLostError)
_fake_module(
    "stoker_engine.parallel.device",
    limit_threads=THREADS.append,
    resolve_device=lambda args: args.device,
    use_device=lambda device, index: None,
)
_fake_module("stoker_engine.parallel.shm_communicator", SharedMemory=lambda *_, **__: "fake")
_fake_module("stoker_engine.kernels.cpu.library", library=lambda: None)
_fake_module("stoker_engine.models.checkpoint", find_checkpoint=lambda args: args.model)

from stoker_engine.exec import rank_main  # noqa: E402

if __name__ == "__main__":
    come_to("start")
    if (late := DEATHS / f"late-{RANK}").exists():
        time.sleep(float(late.read_text()))  # sleeps: a rank that starts late
    code = rank_main.main(sys.argv[2:])
    os._exit(code)
