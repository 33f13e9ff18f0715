"""An internal error of the operator is reported by the endpoint, and does not delay others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.manager import reconciler as reconciler_module
from stoker_operator.manager.controller import Controller
from stoker_operator.objects.facts import Key
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.process.background_loop import WorkerThreads
from stoker_operator.reconcile import reconcile as reconcile_module
from stoker_operator.reconcile.reconcile import Outcome, reconcile
from stoker_operator.settings import Settings

from .fake_cluster import KEY, World

OTHER = Key("default", "other")


@pytest.fixture
def world(document: Any) -> World:
    return World(document())


def controller(world: World, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Controller:
    made = Controller(Settings(**settings), world.kube, Catalogue.load())
    made._informer.relist()
    monkeypatch.setattr(made._process, "epoch", lambda: 1)
    return made


def conditions(world: World) -> dict[str, Any]:
    live = world.kube.objects[KIND, "demo"]
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    return {each["type"]: each for each in live["status"]["conditions"]}


def test_internal_error_is_a_condition_until_it_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("nobody thought of this")

    async def main() -> None:
        operator = controller(world, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(reconcile_module, "evaluate", broken)
            with pytest.raises(ArithmeticError):
                await operator._reconcile(KEY)
        for kind, status in (("Ready", "False"), ("Stalled", "True")):
            found = conditions(world)[kind]
            assert (found["status"], found["reason"]) == (status, "ReconcileError")
            assert "ArithmeticError: nobody thought of this" in found["message"]
        await operator._reconcile(KEY)
        assert conditions(world)["Ready"]["reason"] == "RollingOut"
        assert conditions(world)["Stalled"]["status"] == "False"

    asyncio.run(main())


def test_internal_error_keeps_conditions_of_the_same_spec(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("nobody thought of this")

    async def main() -> None:
        operator = controller(world, monkeypatch)
        await operator._reconcile(KEY)
        world.serve()
        operator._informer.relist()
        await operator._reconcile(KEY)
        before = conditions(world)
        with monkeypatch.context() as patch:
            patch.setattr(reconcile_module, "evaluate", broken)
            with pytest.raises(ArithmeticError):
                await operator._reconcile(KEY)
        after = conditions(world)
        assert after.pop("Stalled")["reason"] == "ReconcileError"
        assert before.pop("Stalled")["status"] == "False"
        assert after == before

    asyncio.run(main())


def test_slow_reconcile_is_reported_and_completes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, reported = threading.Event(), asyncio.Event()

    def slow(*arguments: Any) -> Outcome:
        assert may_end.wait(120)
        return reconcile(*arguments)

    async def main() -> None:
        operator = controller(world, monkeypatch, reconcile_seconds=0.01)
        loop = asyncio.get_running_loop()
        report = operator._reconciler._report

        def report_and_signal(*arguments: Any) -> None:
            report(*arguments)
            loop.call_soon_threadsafe(reported.set)

        monkeypatch.setattr(operator._reconciler, "_report", report_and_signal)
        monkeypatch.setattr(reconciler_module, "reconcile", slow)
        running = asyncio.create_task(operator._reconcile(KEY))
        async with asyncio.timeout(120):
            await reported.wait()
            assert conditions(world)["Stalled"]["reason"] == "ReconcileError"
            assert "for more than 0.01 seconds" in conditions(world)["Ready"]["message"]
            may_end.set()
            await running
        assert conditions(world)["Stalled"]["status"] == "False"

    asyncio.run(main())


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_hanging_calls_delay_no_others(released: threading.Event) -> None:
    async def main() -> None:
        workers, late = WorkerThreads("test", 2, 0.01), asyncio.Semaphore(0)
        hanging = [asyncio.create_task(workers.call(lambda: released.wait(120), late.release)) for _ in range(5)]
        async with asyncio.timeout(120):
            for _ in hanging:
                await late.acquire()
            assert await workers.call(lambda: "answer", lambda: None) == "answer"
        released.set()
        assert await asyncio.gather(*hanging) == [True] * 5

    asyncio.run(main())


def test_concurrent_calls_are_limited_by_slots(released: threading.Event) -> None:
    async def main() -> None:
        workers, started = WorkerThreads("test", 2, 30), threading.Semaphore(0)

        def work() -> None:
            started.release()
            assert released.wait(120)

        calls = [asyncio.create_task(workers.call(work, lambda: None)) for _ in range(4)]
        for _ in range(2):
            assert await asyncio.to_thread(started.acquire, timeout=120)
        assert not started.acquire(blocking=False)
        released.set()
        await asyncio.gather(*calls)

    asyncio.run(main())


def test_error_in_a_thread_is_raised_in_the_caller() -> None:
    def broken() -> None:
        raise KeyError("this")

    with pytest.raises(KeyError):
        asyncio.run(WorkerThreads("test", 1, 30).call(broken, lambda: None))
