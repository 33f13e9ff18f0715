"""How often a server restarts its engine, and which requests wait for that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable

import pytest

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError
from stoker_engine.server.engine import restarts
from stoker_engine.server.engine.restarts import Restarts, wait_any

DEATH = EngineDeadError("it was killed by signal 9")


def test_restarts_are_limited_per_hour() -> None:
    now = 0.0
    policy = Restarts(2, clock=lambda: now)
    for now in (0.0, 1000.0):  # noqa: B007 - the clock reads it
        assert policy.allowed(DEATH)
        with policy.one():
            pass
    now = 3599.0
    assert not policy.allowed(DEATH)
    now = 3600.0
    assert policy.allowed(DEATH)
    with policy.one():
        pass
    assert not policy.allowed(DEATH)


async def turns() -> None:
    """Run all tasks until they wait."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_restarts_are_off_at_zero() -> None:
    assert not Restarts(0).allowed(DEATH)


@pytest.mark.parametrize("death", [EngineOutOfMemoryError("no memory"), EngineStuckError("it was stuck")])
def test_out_of_memory_and_stuck_engines_are_not_restarted(death: EngineDeadError) -> None:
    assert not Restarts(9).allowed(death)


def test_requests_wait_until_the_restart_ends() -> None:
    async def run() -> None:
        policy = Restarts(1)
        order = itertools.count()
        early = asyncio.create_task(_then(policy.wait(), order))  # before the death is noticed
        await turns()
        with policy.one():
            late = asyncio.create_task(_then(policy.wait(), order))
            await turns()
            assert next(order) == 0
        assert {await early, await late} == {1, 2}

    asyncio.run(run())


def test_requests_do_not_wait_if_no_restart_will_come() -> None:
    async def run() -> None:
        policy = Restarts(1)
        waits = asyncio.create_task(policy.wait())
        await turns()
        assert not waits.done()
        policy.give_up()
        await waits
        await policy.wait()
        await Restarts(0).wait()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_requests_keep_waiting_while_restarts_fail() -> None:
    async def run() -> None:
        policy = Restarts(3)
        ready = False
        waits = asyncio.create_task(policy.wait(lambda: ready))
        for _ in range(2):
            with contextlib.suppress(EngineDeadError), policy.one():
                await turns()
                raise DEATH
            await turns()
            assert not waits.done()
        with policy.one():
            pass
        await turns()
        assert not waits.done(), "the engine has died again"
        with policy.one():
            ready = True
        assert await waits
        failing = asyncio.create_task(policy.wait())
        await turns()
        policy.give_up()
        assert not await failing

    asyncio.run(asyncio.wait_for(run(), 120))


def test_requests_stop_waiting_when_an_engine_is_loaded_without_a_restart() -> None:
    async def run() -> None:
        dead, loading = Restarts(None), Restarts(None)
        ready = False
        with contextlib.suppress(EngineDeadError), dead.one():
            waits = asyncio.create_task(wait_any([dead, loading], lambda: ready))
            await turns()
            loading.on_later_load()
            await turns()
            assert not waits.done(), "it has died again"
            ready = True
            loading.on_later_load()
            assert await waits
            raise DEATH

    asyncio.run(asyncio.wait_for(run(), 120))


def test_requests_wait_no_longer_than_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PATIENCE_S", 0.05)

    async def run() -> None:
        policy = Restarts(1)
        await policy.wait()  # no restart comes
        with policy.one():
            await policy.wait()  # it takes too long

    asyncio.run(asyncio.wait_for(run(), 120))


async def _then(work: Awaitable[None], order: itertools.count[int]) -> int:
    await work
    return next(order)
