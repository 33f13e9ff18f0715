"""Interface between the engine and the processes and devices that run the model.

Each process runs steps one after the other, in the order of their launch. Several steps may be launched before the
first is collected; scheduling and the processing of results can then overlap with the model's work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.adapters import load_adapter
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.exec.runner import Runner
from stoker_engine.grammar.token_table import TokenTable


class Executor(Protocol):
    """Runs steps and manages the grammars and adapters of the ranks.

    Attributes:
        plan: size of the KV cache.
        on_cpu: whether the model runs on the CPU, where each token of a step adds to its duration.
        runs_ahead: whether `launch` returns while the step runs, so that steps in flight overlap with the host's work
            without a thread.
    """

    plan: KVCachePlan
    on_cpu: bool
    runs_ahead: bool

    def launch(self, step: Step) -> None:
        """Start a step; it may already have run when this returns."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result.

        Raises:
            Exception: the step failed. `discard_in_flight` must be called before the next launch.
        """
        ...

    def discard_in_flight(self) -> None:
        """Wait for all launched steps, and discard their results and errors."""
        ...

    def set_token_table(self, table: TokenTable) -> None:
        """Set the vocabulary as bytes. Called before the first grammar."""
        ...

    def prepare(self, grammar: Grammar) -> Future[object]:
        """Start to compile a grammar, concurrently with the steps. The future returns the value for `Grammar.compiled`,
        or raises `GrammarError`."""
        ...

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Start to load a LoRA adapter on all ranks, concurrently with the steps. If a rank cannot load it, the future
        raises `AdapterError`, and no rank keeps it."""
        ...

    def drop_adapter(self, number: int) -> None:
        """Free the memory of a loaded adapter after the launched steps have run. Later steps must not use it."""
        ...

    def shutdown(self) -> None:
        """Shut down. Nothing can be launched or collected afterwards."""
        ...


class LocalExecutor:
    """Runs steps in this process. An accelerator runs them while the host goes on.

    Args:
        overlap: on a CPU, run steps in a separate thread, so that `launch` returns immediately.
    """

    def __init__(self, runner: Runner, overlap: bool = False) -> None:
        self.runner = runner
        self.plan = runner.plan
        self.on_cpu = runner.device.type == "cpu"
        self.runs_ahead = runner.runs_ahead
        self._thread = ThreadPoolExecutor(1, "steps") if overlap and self.on_cpu else None
        self._launched: deque[Callable[[], StepResult]] = deque()
        self._loader = ThreadPoolExecutor(1, "adapters")  # its thread starts with the first load
        self._last_drop: Future[None] | None = None

    def launch(self, step: Step) -> None:
        """See `Executor`."""
        if self._thread is not None:
            self._launched.append(self._thread.submit(self.runner.run, step).result)
        else:
            self.runner.launch(step)
            self._launched.append(self.runner.collect)

    def collect(self) -> StepResult:
        """See `Executor`."""
        result = self._launched[0]()
        self._launched.popleft()
        return result

    def discard_in_flight(self) -> None:
        """See `Executor`."""
        if self._thread is None:
            self._launched.clear()
        while self._launched:
            with contextlib.suppress(Exception):
                self._launched[0]()
            self._launched.popleft()
        self.runner.discard_in_flight()

    def set_token_table(self, table: TokenTable) -> None:
        """See `Executor`."""
        self.runner.grammars.set_token_table(table)

    def prepare(self, grammar: Grammar) -> Future[object]:
        """See `Executor`."""
        return self.runner.grammars.prepare(grammar)

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """See `Executor`."""
        return self._loader.submit(self._load_adapter, source, self._last_drop)

    def drop_adapter(self, number: int) -> None:
        """See `Executor`."""
        adapters = self.runner.adapters
        assert adapters is not None, "it is not loaded"
        if self._thread is None:
            adapters.drop(number)
        else:  # after the launched steps, which may use it
            self._last_drop = self._thread.submit(adapters.drop, number)

    def _load_adapter(self, source: AdapterSource, after: Future[None] | None) -> LoadedAdapter:
        if after is not None:
            after.result()  # the load may need the freed memory
        return load_adapter(self.runner.adapters, source)

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._thread is not None:
            self._thread.shutdown()
        self._loader.shutdown(wait=False, cancel_futures=True)
