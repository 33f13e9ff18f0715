"""How often a server restarts its engine, and which requests wait for that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable

import pytest

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError
from stoker_engine.server.engine import restarts
from stoker_engine.server.engine.restarts import Restarts

DEATH = EngineDeadError("it was killed by signal 9")


def test_so_many_an_hour() -> None:
    now = 0.0
    kept = Restarts(2, clock=lambda: now)
    for now in (0.0, 1000.0):  # noqa: B007 - the clock reads it
        assert kept.allowed(DEATH)
        with kept.one():
            pass
    now = 3599.0
    assert not kept.allowed(DEATH)
    now = 3600.0
    assert kept.allowed(DEATH)
    with kept.one():
        pass
    assert not kept.allowed(DEATH)


async def turns() -> None:
    """Run all tasks as far as possible."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_none_unless_asked_for() -> None:
    assert not Restarts(0).allowed(DEATH)


@pytest.mark.parametrize("death", [EngineOutOfMemoryError("no memory"), EngineStuckError("it was stuck")])
def test_none_where_another_process_fares_no_better(death: EngineDeadError) -> None:
    assert not Restarts(9).allowed(death)


def test_who_comes_meanwhile_waits_for_the_end() -> None:
    async def run() -> None:
        kept = Restarts(1)
        order = itertools.count()
        early = asyncio.create_task(_then(kept.wait(), order))  # before the death is noticed
        await turns()
        with kept.one():
            late = asyncio.create_task(_then(kept.wait(), order))
            await turns()
            assert next(order) == 0
        assert {await early, await late} == {1, 2}

    asyncio.run(run())


def test_nobody_waits_for_a_restart_that_will_not_be() -> None:
    async def run() -> None:
        kept = Restarts(1)
        waits = asyncio.create_task(kept.wait())
        await turns()
        assert not waits.done()
        kept.give_up()
        await waits
        await kept.wait()
        await Restarts(0).wait()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_who_waits_goes_on_waiting_where_loading_fails_too() -> None:
    async def run() -> None:
        kept = Restarts(3)
        ready = False
        waits = asyncio.create_task(kept.wait(lambda: ready))
        for _ in range(2):
            with contextlib.suppress(EngineDeadError), kept.one():
                await turns()
                raise DEATH
            await turns()
            assert not waits.done()
        with kept.one():
            pass
        await turns()
        assert not waits.done(), "it has died again since"
        with kept.one():
            ready = True
        assert await waits
        failing = asyncio.create_task(kept.wait())
        await turns()
        kept.give_up()
        assert not await failing

    asyncio.run(asyncio.wait_for(run(), 120))


def test_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PATIENCE_S", 0.05)

    async def run() -> None:
        kept = Restarts(1)
        await kept.wait()  # no restart comes
        with kept.one():
            await kept.wait()  # it takes too long

    asyncio.run(asyncio.wait_for(run(), 120))


async def _then(work: Awaitable[None], order: itertools.count[int]) -> int:
    await work
    return next(order)
