"""An engine that loads, drops and moves adapters between slots computes each request with its own adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_common.errors import AdapterError
from stoker_engine import SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.engine import NO_SUCH_ADAPTER, Engine
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.device_steps import sample_on_device
from ...support.engine.row_tables import RowTables
from .test_row_spaces import ADAPTERS, SMALL, check_alike, generated, one_by_one, requests, tables


@dataclass
class SlotAdapters:
    """Adapters of `RowTables` in slots.

    Attributes:
        wrong: errors of adapters' files, by number.
        gates: loads of these adapters wait for them.
    """

    tables: RowTables
    max_loras: int
    num_resident: int
    wrong: dict[int, str] = field(default_factory=dict)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    loaded: set[int] = field(default_factory=set)
    loads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables.numbers = torch.full((self.max_loras + 1,), -1)

    def load(self, source: AdapterSource) -> LoadedAdapter:
        if source.number in self.gates:
            assert self.gates[source.number].wait(60)
        if source.number in self.wrong:
            raise AdapterError(self.wrong[source.number])
        assert len(self.loaded) < self.num_resident, "the adapter exceeds the memory"
        self.loaded.add(source.number)
        self.loads.append(source.number)
        return LoadedAdapter(source.digest or f"content of {source.path}", 8, 1000, 0.25)

    def drop(self, number: int) -> None:
        self.loaded.remove(number)

    def activate(self, slot: int, number: int) -> None:
        assert number in self.loaded
        assert self.tables.numbers is not None
        self.tables.numbers[slot] = number


def lora_args(model: Path, **options: Any) -> EngineArgs:
    return EngineArgs(str(model), enable_lora=True, **{**SMALL, **options})


def lora_engine(args: EngineArgs, native: bool = True, on_device: bool = False) -> tuple[Engine, SlotAdapters]:
    checkpoint, extend = find_checkpoint(args), tables(native)
    runner = build_runner(args, checkpoint, adapt=lambda build: replace(build, extend=extend))
    runner.adapters = adapters = SlotAdapters(extend, args.max_loras, args.num_resident_adapters)
    if on_device:
        sample_on_device(runner)
    executor = LocalExecutor(runner, overlap=bool(args.async_scheduling) and not on_device)
    return Engine(args, checkpoint, executor=executor), adapters


def register(engine: Engine, *numbers: int) -> None:
    for number in numbers:
        ready = engine.load_adapter(AdapterSource(number, f"adapter {number}", f"/{number}"))
        while not ready.done():
            engine.step()
        ready.result()


Start = Callable[..., tuple[Engine, SlotAdapters]]


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Start]:
    """Start engines."""
    started: list[Engine] = []

    def start(**options: Any) -> tuple[Engine, SlotAdapters]:
        engine, adapters = lora_engine(lora_args(tiny_llama, **options))
        started.append(engine)
        return engine, adapters

    yield start
    for engine in started:
        engine.shutdown()


def request(name: str, adapter: int, max_tokens: int = 3, **options: Any) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, [5, 6, 7, 8], params, max_tokens, adapter=adapter, **options)


def drain(engine: Engine) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
    return deltas


def ends(deltas: list[TokenDelta]) -> dict[str, tuple[FinishReason, str | None]]:
    return {delta.request_id: (delta.finish_reason, delta.error) for delta in deltas if delta.finish_reason is not None}


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("max_cpu_loras", [2, 3])
@pytest.mark.parametrize("how", ["one by one", "in flight", "on a device"])
def test_each_request_gets_its_own_adapter(max_loras: int, max_cpu_loras: int, how: str, tiny_llama: Path) -> None:
    options = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "async_scheduling": how != "one by one"}
    args = lora_args(tiny_llama, num_gpu_blocks_override=40, **options)
    without = replace(args, enable_lora=False, max_loras=EngineArgs.max_loras, max_cpu_loras=None)
    submitted = requests(7, 500, count=12)
    engine, adapters = lora_engine(args, on_device=how == "on a device")
    register(engine, *range(ADAPTERS))
    found = generated(engine, submitted)
    assert max_cpu_loras == ADAPTERS or len(adapters.loads) > ADAPTERS, "no adapter was loaded again"
    check_alike(found, one_by_one(without, submitted, native=True))


def test_a_request_waiting_for_files_blocks_no_other(start: Start) -> None:
    engine, adapters = start(max_loras=1, max_cpu_loras=1)
    register(engine, 0, 1)
    adapters.gates[0] = threading.Event()
    engine.add(request("slow", 0))
    engine.add(request("base", -1))
    deltas: list[TokenDelta] = []
    while "base" not in ends(deltas):
        deltas += engine.step().deltas
    assert engine.has_work and "slow" not in {delta.request_id for delta in deltas}
    assert engine.step() == StepOutputs([], None)
    adapters.gates[0].set()
    assert ends(drain(engine)) == {"slow": (FinishReason.LENGTH, None)}


def test_a_request_waiting_for_files_is_reported(start: Start) -> None:
    engine, adapters = start(max_loras=1, max_cpu_loras=1)
    register(engine, 0, 1)
    while engine.has_work:
        engine.step()
    adapters.gates[0] = threading.Event()
    engine.add(request("slow", 0))
    report = engine.step().report
    assert report is not None and report.stats.adapters is not None
    assert (report.stats.num_waiting, report.stats.adapters.waiting) == (1, ("adapter 0",))
    assert engine.step() == StepOutputs([], None)
    adapters.gates[0].set()
    drain(engine)


def test_missing_files_end_the_requests_waiting_for_them(start: Start) -> None:
    engine, adapters = start(max_loras=1, max_cpu_loras=1)
    register(engine, 0, 1)
    adapters.wrong[0] = "its files are gone"
    for each in (request("a", 0), request("b", 0), request("c", 1), request("d", -1)):
        engine.add(each)
    found = ends(drain(engine))
    assert found["a"] == found["b"] == (FinishReason.ERROR, "its files are gone")
    assert found["c"] == found["d"] == (FinishReason.LENGTH, None)
    adapters.wrong.clear()
    engine.add(request("e", 0))
    assert ends(drain(engine)) == {"e": (FinishReason.LENGTH, None)}
    assert len(adapters.loaded) == 1


def test_changed_files_end_the_requests_waiting_for_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, adapters = start(max_loras=1, max_cpu_loras=1)
    register(engine, 0, 1)
    load = adapters.load
    monkeypatch.setattr(adapters, "load", lambda source: replace(load(source), digest="another"))
    engine.add(request("a", 0))
    [(reason, error)] = ends(drain(engine)).values()
    assert reason is FinishReason.ERROR and error is not None and "adapter 0 in /0 have changed" in error
    assert not adapters.loaded


def test_a_failed_registration_leaves_nothing(start: Start) -> None:
    engine, adapters = start()
    adapters.wrong[0] = "no such folder"
    ready = engine.load_adapter(AdapterSource(0, "a", "/a"))
    while not ready.done():
        engine.step()
    with pytest.raises(AdapterError, match=r"^no such folder$"):
        ready.result()
    engine.add(request("a", 0))
    assert ends(drain(engine)) == {"a": (FinishReason.ERROR, NO_SUCH_ADAPTER)}


def test_a_failed_load_is_reported(start: Start) -> None:
    engine, adapters = start()
    adapters.wrong[1] = "no such folder"
    engine.load_adapter(AdapterSource(0, "a", "/a"))
    engine.load_adapter(AdapterSource(1, "b", "/b"))
    seconds: list[float] = []
    while engine.has_work:
        report = engine.step().report
        if report is not None and report.stats.adapters is not None:
            seconds += report.stats.adapters.load_seconds
            last = report.stats.adapters
    assert (last.loads, last.failures, last.evictions, seconds) == (1, 1, 0, [0.25])


def test_a_removed_adapter_still_serves_earlier_requests(start: Start) -> None:
    engine, adapters = start(max_loras=1, max_cpu_loras=2)
    register(engine, 0, 1)
    engine.add(request("a", 0, 6))
    engine.add(request("b", 1, 6))  # waits
    engine.step()
    engine.remove_adapter(0)
    engine.remove_adapter(1)
    engine.remove_adapter(7)
    engine.add(request("late", 0))
    found = ends(drain(engine))
    assert found["a"] == found["b"] == (FinishReason.LENGTH, None)
    assert found["late"] == (FinishReason.ERROR, NO_SUCH_ADAPTER)
    assert not adapters.loaded and not engine.has_work


def test_an_adapter_may_be_removed_while_it_is_loaded(start: Start) -> None:
    engine, adapters = start()
    adapters.gates[0] = threading.Event()
    ready = [engine.load_adapter(AdapterSource(number, f"adapter {number}", "/")) for number in (0, 1)]
    engine.remove_adapter(0)
    engine.remove_adapter(1)  # it waits for the other one
    engine.step()
    adapters.gates[0].set()
    drain(engine)
    assert ready[0].result().num_bytes == 1000 and not adapters.loaded
    with pytest.raises(AdapterError, match="adapter 1 was removed before it was loaded"):
        ready[1].result()


def test_a_request_whose_grammar_is_compiled_keeps_its_adapter(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, adapters = start()
    register(engine, 0)
    from concurrent.futures import Future

    compiled: Future[object] = Future()
    monkeypatch.setattr(engine.executor, "prepare", lambda grammar: compiled)
    engine.add(request("a", 0, grammar=Grammar("root ::= [a-z]+")))
    engine.remove_adapter(0)
    for _ in range(3):
        engine.step()
    assert adapters.loaded == {0}
    engine.abort("a")
    drain(engine)
    assert not adapters.loaded


def test_without_lora_no_adapter_is_loaded(tiny_llama: Path) -> None:
    engine = Engine.from_args(EngineArgs(str(tiny_llama), **SMALL))
    with pytest.raises(AdapterError, match="--enable-lora"):
        engine.load_adapter(AdapterSource(0, "a", "/a"))
    engine.remove_adapter(0)
    engine.shutdown()
