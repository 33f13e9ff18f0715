"""Who runs the steps: the seam between the engine and the processes and devices that the model is on.

Steps run in the order they are launched, each as a whole. Two may be launched before the first is collected; then the
host's work on one step goes on beside the model's on the next.
"""

from __future__ import annotations

from collections import deque
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
    """Runs steps.

    Attributes:
        plan: the KV cache's size.
        on_cpu: whether the model runs on the CPU, where every token of a step costs time.
    """

    plan: KVCachePlan
    on_cpu: bool

    def launch(self, step: Step) -> None:
        """Begins a step; it may already have run when this returns."""
        ...

    def collect(self) -> StepResult:
        """Waits for the first step launched and not yet collected.

        Raises:
            Exception: what ended the step. No step after it has a result.
        """
        ...

    def discard_in_flight(self) -> None:
        """Waits for what is launched, and drops it."""
        ...

    def set_token_table(self, table: TokenTable) -> None:
        """The vocabulary as bytes, before the first grammar."""
        ...

    def prepare(self, grammar: Grammar) -> Future[object]:
        """Begins to make a grammar ready, beside the steps. The future has its `Grammar.compiled`, or raises
        `GrammarError` where that cannot be."""
        ...

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Begins to load a LoRA adapter on all ranks, beside the steps. The future raises `AdapterError` where one of
        them cannot, and then none has it."""
        ...

    def drop_adapter(self, number: int) -> None:
        """Frees the memory of a loaded adapter once the steps that are launched have run; no later one uses it."""
        ...

    def shutdown(self) -> None:
        """Ends; nothing is launched or collected after."""
        ...


class LocalExecutor:
    """Runs steps in this process.

    Args:
        overlap: run them in a thread of their own, so that `launch` returns at once.
    """

    def __init__(self, runner: Runner, overlap: bool = False) -> None:
        self.runner = runner
        self.plan = runner.plan
        self.on_cpu = runner.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "steps") if overlap else None
        self._launched: deque[Future[StepResult]] = deque()
        self._loader = ThreadPoolExecutor(1, "adapters")  # it begins with the first load
        self._last_drop: Future[None] | None = None

    def launch(self, step: Step) -> None:
        """See `Executor`."""
        if self._thread is not None:
            self._launched.append(self._thread.submit(self.runner.run, step))
            return
        done: Future[StepResult] = Future()
        done.set_result(self.runner.run(step))
        self._launched.append(done)

    def collect(self) -> StepResult:
        """See `Executor`."""
        result = self._launched[0].result()
        self._launched.popleft()
        return result

    def discard_in_flight(self) -> None:
        """See `Executor`."""
        while self._launched:
            self._launched[0].exception()
            self._launched.popleft()

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
        else:  # behind the steps that are launched, which may use it
            self._last_drop = self._thread.submit(adapters.drop, number)

    def _load_adapter(self, source: AdapterSource, after: Future[None] | None) -> LoadedAdapter:
        if after is not None:
            after.result()  # it needs the memory
        return load_adapter(self.runner.adapters, source)

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._thread is not None:
            self._thread.shutdown()
        self._loader.shutdown(wait=False, cancel_futures=True)
