"""Reductions, gathers and broadcasts in shared memory, compared with torch's results on all ranks' inputs.

Ranks are threads if only results matter, which shared memory cannot distinguish from processes; they are forked
processes if they are killed and stopped.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from stoker_engine.kernels.cpu.library import library
from stoker_engine.parallel.communicator import RankLostError
from stoker_engine.parallel.shm_communicator import ShmCommunicator

T = TypeVar("T")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUMMED = (*FLOATS, torch.int64, torch.int32)
SENT = (*SUMMED, torch.uint8, torch.bool, torch.float8_e4m3fn)
SIZES = [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)]
#: Elements around all size thresholds: vectors, one pass (32 KiB), a slot (256 KiB), two slots.
EDGES = (0, 1, 4, 8, 16, 32, 64, 640, 8192, 16384, 65536, 131072, 262144)


@functools.cache
def kernels() -> ctypes.CDLL:
    found = library()
    if found is None:
        pytest.skip("there are no CPU kernels here")
    return found


@contextmanager
def region() -> Iterator[int]:
    fd = os.memfd_create("ranks")
    try:
        yield fd
    finally:
        os.close(fd)


def together(size: int, work: Callable[[ShmCommunicator], T], timeout_s: float = 120, spin_us: float = 50) -> list[T]:
    """Return what `work` returns in each of `size` ranks, which are threads."""
    with region() as fd, ThreadPoolExecutor(size) as pool:
        members = [ShmCommunicator(rank, size, fd, timeout_s, kernels(), spin_us) for rank in range(size)]
        return list(pool.map(work, members))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert bitwise equality, except for the kind of NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype in FLOATS:
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num(nan=7), expected.nan_to_num(nan=7)
    assert torch.equal(bits(found), bits(expected))


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return the rank's input: elements have very different sizes, so that sums depend on their order; some are NaN,
    infinite or signed zeros.
    """
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 7, shape, generator=generator)
    for value, every in ((float("nan"), 97), (float("inf"), 89), (float("-inf"), 83), (-0.0, 3)):
        x = torch.where(torch.randint(0, every, shape, generator=generator) == 0, value, x)
    return x.to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
    return functools.reduce(torch.add, [part.float() if narrow else part for part in parts]).to(parts[0].dtype)


@dataclass(frozen=True)
class Operation:
    """An operation of all ranks; `widths` by rank."""

    name: str
    dtype: torch.dtype
    rows: int
    widths: tuple[int, ...]
    seed: int

    def part(self, rank: int) -> torch.Tensor:
        return rank_input(rank, (self.rows, self.widths[rank]), self.dtype, self.seed)

    def do(self, ranks: ShmCommunicator) -> torch.Tensor:
        x = self.part(ranks.rank)
        if self.seed % 2:  # not contiguous
            x = x.t().contiguous().t()
        result: torch.Tensor = getattr(ranks, self.name)(x)
        return result.clone()

    def expected(self) -> torch.Tensor:
        parts = [self.part(rank) for rank in range(len(self.widths))]
        if self.name == "all_reduce":
            return summed(parts)
        return parts[0] if self.name == "broadcast" else torch.cat(parts, dim=-1)


def draw(chance: random.Random, size: int) -> Operation:
    name = chance.choice(("all_reduce", "all_reduce", "all_gather", "broadcast"))
    rows = chance.choice((1, 1, 2, 3, 7, 0))
    width = max(0, chance.choice(EDGES) // chance.choice((1, max(1, rows))) + chance.choice((-1, 0, 0, 1)))
    widths = [width] * size
    if name == "all_gather":
        widths = [chance.choice((width, width, width // 2, width + 1, 0)) for _ in range(size)]
    dtype = chance.choice(SUMMED if name == "all_reduce" else SENT)
    return Operation(name, dtype, rows, tuple(widths), chance.randrange(2**20))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spin_us", [50, 0], ids=["spinning", "sleeping"])
def test_sequences_of_operations_equal_torch(size: int, spin_us: float) -> None:
    chance = random.Random(f"{size} {spin_us}")
    count = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "40"))
    operations = [draw(chance, size) for _ in range(count)]
    done = together(size, lambda ranks: [operation.do(ranks) for operation in operations], spin_us=spin_us)
    for index, operation in enumerate(operations):
        assert_same(done[0][index], operation.expected())
        for results in done[1:]:
            assert torch.equal(bits(results[index]), bits(done[0][index])), operation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_reduce_of_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Tensors are reduced in one pass, in slices, or in several pieces."""
    size, width, rows = 4, 2047, 300  # 1.2 MB of bf16: five pieces

    def work(ranks: ShmCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        x = rank_input(ranks.rank, (rows, width), dtype, 1)
        some = torch.cat([ranks.all_reduce(x[row : row + n].clone()) for row, n in ((0, 1), (1, 2), (3, 30), (33, 5))])
        return some, ranks.all_reduce(x.clone())[:38]

    for some, whole in together(size, work):
        assert torch.equal(bits(some), bits(whole))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_different_calls_get_an_error(size: int) -> None:
    x = torch.zeros(64)
    calls: list[tuple[Callable[[ShmCommunicator], object], str]] = [
        (lambda ranks: ranks.all_reduce(x.clone()), "all_reduce of 256 bytes (torch.float32)"),
        (lambda ranks: ranks.all_reduce(x[:63].clone()), "all_reduce of 252 bytes (torch.float32)"),
        (lambda ranks: ranks.all_reduce(x.bfloat16()), "all_reduce of 128 bytes (torch.bfloat16)"),
        (lambda ranks: ranks.all_reduce(x.half()), "all_reduce of 128 bytes (torch.float16)"),
        (lambda ranks: ranks.all_gather(x[:32]), "all_gather of 128 bytes (torch.float32)"),
        (lambda ranks: ranks.all_gather(x.view(2, 32)), "all_gather of 2 × 128 bytes (torch.float32)"),
        (lambda ranks: ranks.all_gather(x[:32].int()), "all_gather of 128 bytes (torch.int32)"),
        (lambda ranks: ranks.broadcast(x.clone()), "broadcast of 256 bytes (torch.float32)"),
        (lambda ranks: ranks.broadcast(x[:5].clone()), "broadcast of 20 bytes (torch.float32)"),
    ]
    for one, (do_one, one_call) in enumerate(calls):
        for other, (do_other, other_call) in enumerate(calls):
            if one != other:

                def work(ranks: ShmCommunicator) -> str:
                    ranks.all_reduce(torch.ones(3))
                    last = ranks.rank == size - 1
                    with pytest.raises(RankLostError) as raised:
                        (do_other if last else do_one)(ranks)  # noqa: B023  # called at once
                    with pytest.raises(RankLostError):  # later calls fail, too
                        ranks.broadcast(torch.ones(3))
                    return str(raised.value)

                first, *_, last = together(size, work)
                assert f"rank 0 of {size} called {one_call}, but rank {size - 1} called {other_call}" in first
                assert f"called {other_call}, but rank 0 called {one_call}" in last


def test_missing_rank_is_named() -> None:
    absent = threading.Event()

    def work(ranks: ShmCommunicator) -> str:
        if ranks.rank in (1, 2):
            absent.wait(60)
            return ""
        with pytest.raises(RankLostError) as raised:
            ranks.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
        if ranks.rank == 3:
            absent.set()
        return str(raised.value)

    errors = together(4, work, timeout_s=1)
    for rank in (0, 3):
        reason = "did not hear from rank 1, 2 within 1 s (all_reduce of 12 bytes"
        assert f"rank {rank} of 4 {reason}" in errors[rank]


class Forked:
    """Ranks that are processes; each runs operations until the test ends it or one fails.

    They are forked, so that torch need not be imported again, and use only what works after a fork: the kernels.
    """

    def __init__(self, size: int, seed: int, timeout_s: float, spin_us: float) -> None:
        self.pids, self.pipes = [], []
        lengths = random.Random(seed).choices(EDGES, k=50)
        kernels()
        with region() as fd:
            for rank in range(size):
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    self._run(ShmCommunicator(rank, size, fd, timeout_s, kernels(), spin_us), lengths, write)
                os.close(write)
                self.pids.append(pid)
                self.pipes.append(read)

    def _run(self, ranks: ShmCommunicator, lengths: list[int], write: int) -> None:
        outcome, rounds = "", 0
        try:
            total = ranks.size * (ranks.size + 1) // 2
            while not outcome:
                length = lengths[rounds % len(lengths)]
                x = torch.empty(length)
                ctypes.memmove(x.data_ptr(), (ctypes.c_float * length)(*[ranks.rank + 1.0] * length), length * 4)
                ranks.all_reduce(x)
                values = (ctypes.c_float * length).from_address(x.data_ptr()) if length else ()
                if any(value != total for value in values):
                    outcome = "wrong"
                rounds += 1
                if rounds == 3:
                    os.write(write, b"+")  # running
        except BaseException as error:
            outcome = f"{type(error).__name__} {error}"
        os.write(write, outcome.encode())
        os._exit(0)

    def wait_until_under_way(self) -> None:
        for pipe in self.pipes:
            assert os.read(pipe, 1) == b"+"

    def last_message(self, rank: int) -> str:
        """Wait until the rank has ended, and return its last message."""
        text = b""
        while more := os.read(self.pipes[rank], 4096):
            text += more
        return text.decode()

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid, pipe in zip(self.pids, self.pipes, strict=True):
            os.waitpid(pid, 0)
            os.close(pipe)


@contextmanager
def forked(size: int, seed: int, timeout_s: float = 2.0, spin_us: float = 50) -> Iterator[Forked]:
    ranks = Forked(size, seed, timeout_s, spin_us)
    try:
        ranks.wait_until_under_way()
        yield ranks
    finally:
        ranks.close()


KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
ENDS = [
    (KILLED, 2, 0),
    (STOPPED, 3, 1),
    *(pytest.param(how, 4, n, marks=pytest.mark.slow) for how in (KILLED, STOPPED) for n in range(8)),
]


@pytest.mark.parametrize("how, size, seed", ENDS)
def test_ranks_time_out_if_one_is_killed_or_stopped(how: signal.Signals, size: int, seed: int) -> None:
    chance = random.Random(seed)
    with forked(size, seed, spin_us=chance.choice((0, 50))) as ranks:
        time.sleep(chance.uniform(0, 0.1))  # sleeps: random moment of the death
        victim = chance.randrange(size)
        os.kill(ranks.pids[victim], how)
        for rank in set(range(size)) - {victim}:
            report = ranks.last_message(rank)
            assert report.startswith("RankLostError") and f"rank {rank} of {size} did not hear from" in report, report
            late = report.partition("from rank ")[2].partition(" within ")[0].split(", ")
            assert str(victim) in late, report  # other ranks too, if they waited as long
        if how == signal.SIGSTOP:  # a rank that wakes up too late must not continue either
            os.kill(ranks.pids[victim], signal.SIGCONT)
            assert "did not hear from" in ranks.last_message(victim)


def test_short_stops_change_nothing() -> None:
    chance = random.Random(5)
    with forked(3, 5, timeout_s=60) as ranks:
        for _ in range(20):
            victim = ranks.pids[chance.randrange(3)]
            os.kill(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.02))  # sleeps: random duration of the stop
            os.kill(victim, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.005))  # sleeps: random moment of the next stop
        os.kill(ranks.pids[0], signal.SIGKILL)  # no rank found a wrong sum so far
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert ranks.last_message(0) == ranks.last_message(1) == ""
