"""Ranks die, stop or hang: all of them end, and waiting steps get the error of the first one, with its cause."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import types
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_common.errors import (
    ArgumentError,
    EngineDeadError,
    EngineKilledError,
    EngineOutOfMemoryError,
    EngineStuckError,
    StokerError,
    WeightsError,
)
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Step
from stoker_engine.exec import rank_executor
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.exec.supervision import Supervision
from stoker_engine.grammar.matcher import GrammarError
from stoker_engine.parallel.processors import Machine, deal

from ...support.processes import command_line, lives
from ...support.waiting import until

PROGRAM = Path(__file__).with_name("crashing_rank.py")
SIZE = 3
#: Far more than a rank's start takes on a busy machine, in seconds: only hanging ranks reach it.
STEP_TIMEOUT_S = 60.0

Make = Callable[..., RankExecutor]


@pytest.fixture
def deaths(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def deaths_reported() -> list[StokerError]:
    """Errors reported to the supervisor of the ranks."""
    return []


@pytest.fixture
def missing() -> list[tuple[int, ...]]:
    """Reported ranks that have not loaded yet."""
    return []


@pytest.fixture
def make(deaths: Path, deaths_reported: list[StokerError], missing: list[tuple[int, ...]]) -> Iterator[Make]:
    """Create executors of fake ranks; at the end none of their processes remains."""
    made: list[RankExecutor] = []
    before = set(psutil.Process().children(recursive=True))
    open_files = psutil.Process().num_fds()

    def make(*planned: tuple[str, int, str], step_timeout: float = STEP_TIMEOUT_S, **options: Any) -> RankExecutor:
        for point, rank, how in planned:
            (deaths / f"{point}-{rank}").write_text(how)
        checkpoint: Any = types.SimpleNamespace(path=Path("/some/model"))
        args = EngineArgs("org/name", revision="main", device="cpu", tensor_parallel_size=SIZE)
        supervision = Supervision(
            step_timeout, on_death=deaths_reported.append, on_missing_ranks=lambda ranks: missing.append(tuple(ranks))
        )
        executor = RankExecutor(
            args, checkpoint, supervision=supervision, program=(str(PROGRAM), str(deaths)), **options
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()
    assert set(psutil.Process().children(recursive=True)) <= before
    until(lambda: psutil.Process().num_fds() <= open_files, "descriptors are closed")


def _step(number: int) -> Step:
    return Step(number, *(array("i") for _ in range(4)), num_decodes=0, num_tokens=0)


def _run(executor: RankExecutor, steps: int) -> None:
    for number in range(steps):
        executor.launch(_step(number))
        executor.collect()


def _time_to_hang(make: Make) -> float:
    """Return a time that only hanging ranks exceed, in seconds: several times that of a start and a step now."""
    began = time.monotonic()
    executor = make()
    _run(executor, 6)
    executor.shutdown()
    return 3.5 + 4 * (time.monotonic() - began)


def test_ranks_that_have_not_loaded_yet_are_reported(make: Make, missing: list[tuple[int, ...]]) -> None:
    make()
    assert [len(each) for each in missing] == [2, 1, 0]
    assert all(set(after) < set(before) for before, after in zip([tuple(range(SIZE)), *missing], missing, strict=False))


def _check_ended(executor: RankExecutor) -> None:
    """Assert that its ranks end, within seconds even on a busy machine."""
    until(lambda: not any(psutil.pid_exists(rank.pid) for rank in executor._ranks), "all ranks have ended", 10)


def test_results_come_in_order_with_two_steps_in_flight(make: Make) -> None:
    calls: list[tuple[int, int]] = []
    executor = make(on_progress=lambda done, total: calls.append((done, total)))
    plan: Any = executor.plan
    threads = [deal(Machine.current(), SIZE)[0].threads]
    assert (plan.num_blocks, plan.model, plan.threads, executor.on_cpu) == (7, "/some/model", threads, True)
    assert len(calls) > SIZE  # progress is reported during loading, not only at its end
    assert calls == sorted(calls)
    assert calls[-1] == (333, 333), "the progress does not cover the weights of all ranks"
    executor.launch(_step(0))
    for number in range(1, 50):
        executor.launch(_step(number))
        assert executor.collect().sampled[0].token_ids == [list(range(number))]
    assert executor.collect().sampled[0].token_ids == [list(range(50))]


def test_ranks_on_accelerators_launch_and_collect_in_the_executors_order(
    make: Make, deaths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does meanwhile, also if a collection is interrupted."""
    (deaths / "accelerator").touch()
    executor, chance = make(), random.Random(8)
    assert executor.runs_ahead and not executor.on_cpu
    expected = list[str]()
    launched = collected = 0
    while collected < 40:
        if launched == collected or (launched < collected + 2 and chance.random() < 0.7):
            executor.launch(_step(launched))
            expected.append(f"launch {launched}")
            launched += 1
            continue
        if chance.random() < 0.2:  # Ctrl-C while the executor waits
            with monkeypatch.context() as patch:
                patch.setattr(executor, "_results", types.SimpleNamespace(get=_interrupted))
                with pytest.raises(KeyboardInterrupt):
                    executor.collect()
        assert executor.collect().sampled[0].token_ids == [list(range(collected + 1))]
        expected.append(f"collect {collected}")
        collected += 1
    executor.launch(_step(launched))
    executor.discard_in_flight()
    expected += [f"launch {launched}", *(f"collect {number}" for number in range(collected, launched + 1))]
    executor.shutdown()  # after the messages already sent
    for rank in range(SIZE):
        assert (deaths / f"calls-{rank}").read_text().splitlines() == expected


def _interrupted(timeout: float) -> Any:
    raise KeyboardInterrupt


HOWS: dict[str, tuple[type[EngineDeadError], str]] = {
    "9": (EngineKilledError, "SIGKILL"),
    "11": (EngineDeadError, "SIGSEGV"),
    "19": (EngineStuckError, "stopped"),
    "raise": (EngineDeadError, "ZeroDivisionError: a planned death"),
    "memory": (EngineOutOfMemoryError, "MemoryError"),
    "exit": (EngineDeadError, "exit code 3"),
    "half": (EngineDeadError, "exit code 3"),
    "hang": (EngineStuckError, " s$"),
}
#: Cases that are tested in every run.
QUICK = {("start", 1, "9"), ("load", 0, "19"), ("step", 1, "raise"), ("step", 0, "hang"), ("after", 1, "exit")}


@pytest.mark.parametrize(
    "point, rank, how",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("start", "load", "step", "after"), (0, 1), HOWS)
        if case[::2] not in (("start", "raise"), ("start", "memory"))  # at its start a rank cannot report errors yet
    ],
)
def test_all_ranks_end_when_one_dies(
    point: str, rank: int, how: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, words = HOWS[how]
    executor: RankExecutor | None = None
    step_timeout = _time_to_hang(make) if how == "hang" else STEP_TIMEOUT_S
    monkeypatch.setattr(rank_executor, "_START_S", step_timeout)
    with pytest.raises(EngineDeadError, match=words) as ended:
        executor = make((point, rank, how), step_timeout=step_timeout)
        _run(executor, 6)
    assert type(ended.value) is kind
    assert f"rank {rank} of {SIZE}" in str(ended.value)
    assert str(ended.value).count("rank ") == 1
    if executor is not None:
        _check_ended(executor)
        for call in (lambda: executor.launch(_step(9)), executor.collect):
            with pytest.raises(EngineDeadError) as again:
                call()
            assert str(again.value) == str(ended.value)


def test_a_rank_that_starts_late_does_not_count_as_stuck(make: Make, deaths: Path) -> None:
    """The step timeout does not matter: no other rank waits for it until it has started."""
    (deaths / "late-1").write_text("4")
    _run(make(step_timeout=3.0), 6)


@pytest.mark.parametrize("how, words", [("junk", "unreadable message: "), ("unpicklable", "lambda")])
def test_an_unsendable_or_unreadable_result_is_a_death(how: str, words: str, make: Make) -> None:
    executor = make(("after", 0, how))
    with pytest.raises(EngineDeadError, match=f"rank 0 of {SIZE}.*{words}"):
        _run(executor, 6)
    _check_ended(executor)


def test_an_unpicklable_step_is_not_sent(make: Make) -> None:
    executor = make()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        executor.launch(dataclasses.replace(_step(0), new=[lambda: None]))  # type: ignore[list-item]
    executor.launch(_step(1))
    assert executor.collect().sampled[0].token_ids == [[1]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "how, kind, words",
    [
        ("argument", ArgumentError, "--dtype: a planned refusal; choose another"),
        ("model", WeightsError, "a planned lack"),
    ],
)
def test_loading_errors_keep_their_type(how: str, rank: int, kind: type[Exception], words: str, make: Make) -> None:
    with pytest.raises(kind, match=words) as refused:
        make(("load", rank, how))
    assert type(refused.value) is kind


def test_results_of_discarded_steps_are_not_returned(make: Make) -> None:
    executor = make()
    for number in range(3):
        executor.launch(_step(number))
    executor.collect()
    executor.discard_in_flight()
    executor.launch(_step(3))
    assert executor.collect().sampled[0].token_ids == [[0, 1, 2, 3]]
    executor.launch(_step(4))
    os.kill(executor._ranks[0].pid, signal.SIGKILL)
    executor.discard_in_flight()
    with pytest.raises(EngineKilledError):
        executor.collect()


@pytest.mark.parametrize("signum, kind", [(signal.SIGKILL, EngineKilledError), (signal.SIGSTOP, EngineStuckError)])
def test_a_death_or_stop_between_steps_ends_all_ranks_and_is_reported(
    signum: signal.Signals, kind: type[EngineDeadError], make: Make, deaths_reported: list[StokerError]
) -> None:
    executor = make()
    _run(executor, 2)
    assert not deaths_reported
    os.kill(executor._ranks[1].pid, signum)
    _check_ended(executor)
    until(lambda: len(deaths_reported) > 0, "the death is reported")
    assert type(deaths_reported[0]) is kind
    assert f"rank 1 of {SIZE}" in str(deaths_reported[0])
    with pytest.raises(kind) as raised:
        executor.launch(_step(3))
    assert raised.value is deaths_reported[0]


def test_a_briefly_stopped_rank_continues(make: Make, deaths_reported: list[StokerError]) -> None:
    executor = make()
    for _ in range(2):
        os.kill(executor._ranks[2].pid, signal.SIGSTOP)
        executor.launch(_step(0))
        os.kill(executor._ranks[2].pid, signal.SIGCONT)
        executor.collect()
    assert not deaths_reported


def test_shutdown_reports_no_death(make: Make, deaths_reported: list[StokerError]) -> None:
    executor = make()
    executor.shutdown()
    _check_ended(executor)
    assert not deaths_reported


def test_grammars_are_compiled_while_steps_run(make: Make, deaths: Path) -> None:
    executor = make()
    sources = [f"grammar-{number}" for number in range(20)]
    chance = random.Random(0)
    ready = {source: executor.prepare(Grammar(source)) for source in sources}
    cancelled = set(chance.sample(sources, 5))
    for source in cancelled:
        assert ready[source].cancel()
    for number, source in enumerate(chance.sample(sources, 20)):
        executor.launch(_step(number))
        assert not ready[source].done() or source in cancelled
        written = deaths / "written"  # appears atomically: a rank reads it as soon as it exists
        written.write_text(f"{source} is wrong" if number % 3 == 0 else "")
        written.rename(deaths / source)
        if source not in cancelled and number % 3 == 0:
            with pytest.raises(GrammarError, match=f"{source} is wrong"):
                ready[source].result(60)
        elif source not in cancelled:
            assert ready[source].result(60) is None
        executor.collect()


def test_pending_grammars_fail_when_a_rank_dies(make: Make) -> None:
    executor = make()
    ready = executor.prepare(Grammar("endless"))
    os.kill(executor._ranks[1].pid, signal.SIGKILL)
    with pytest.raises(EngineKilledError, match=f"rank 1 of {SIZE}"):
        ready.result(60)
    with pytest.raises(EngineKilledError):
        executor.prepare(Grammar("late"))


@pytest.mark.slow
def test_a_rank_that_does_not_read_counts_as_stuck(make: Make) -> None:
    """A step of many prompts is larger than a pipe's capacity."""
    executor = make()
    os.kill(executor._ranks[1].pid, signal.SIGSTOP)
    large = dataclasses.replace(_step(0), rows=array("i", bytes(1 << 24)))
    with pytest.raises(EngineStuckError, match=f"rank 1 of {SIZE} (was stopped|did not read)"):
        executor.launch(large)
    _check_ended(executor)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_rank_killed_at_any_moment_is_named(seed: int, make: Make) -> None:
    chance = random.Random(seed)
    executor, rank = make(), chance.randrange(SIZE)
    signum = chance.choice((signal.SIGKILL, signal.SIGSEGV))
    threading.Timer(chance.random() / 5, os.kill, (executor._ranks[rank].pid, signum)).start()
    with pytest.raises(EngineDeadError, match=f"rank {rank} of {SIZE} .*{signum.name}"):
        _run(executor, 1_000_000)
    _check_ended(executor)


def test_an_exception_in_the_progress_callback_ends_the_ranks(make: Make) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(on_progress=fail)
    assert not [child for child in psutil.Process().children() if str(PROGRAM) in command_line(child)]


def test_an_interrupt_while_a_step_is_sent_ends_the_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()

    def interrupt(data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor._ranks[1], "send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.launch(_step(0))
    monkeypatch.undo()
    _check_ended(executor)
    with pytest.raises(EngineDeadError, match="interrupted"):
        executor.launch(_step(1))


@pytest.mark.slow
def test_shutdown_ends_hanging_and_stopped_ranks(make: Make) -> None:
    executor = make(("step", 0, "hang"))
    for number in range(4):
        executor.launch(_step(number))
    os.kill(executor._ranks[2].pid, signal.SIGSTOP)
    executor.shutdown()
    _check_ended(executor)
    with pytest.raises(EngineDeadError):
        executor.launch(_step(5))


_PARENT = """
import sys, threading, time, types
from pathlib import Path
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec import rank_executor
from stoker_engine.exec.rank_executor import RankExecutor
def run():
    checkpoint = types.SimpleNamespace(path=Path("/m"))
    executor = RankExecutor(EngineArgs("m", device="cpu", tensor_parallel_size=2), checkpoint, program=sys.argv[2:])
    print(*(rank.pid for rank in executor._ranks), flush=True)
    time.sleep(60)
if sys.argv[1] == "main":
    run()
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_ranks_end_with_their_parent_process(thread: str, deaths: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, thread, str(PROGRAM), str(deaths)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        ranks = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        if thread == "main":
            ranks[1].suspend()
        parent.kill()
    assert len(ranks) == 2
    until(lambda: not any(lives(rank) for rank in ranks), "the ranks end with their executor")
