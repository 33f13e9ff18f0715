"""Queue limits over several front ends, and arguments that do not fit several front ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from stoker_common.errors import ArgumentError, OverloadedError
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.server.engine.admission import Admission
from stoker_engine.server.engine.peers import SharedCounts
from stoker_engine.server.front_ends.process_metrics import ProcessesCollector


@dataclass
class FakePeers:
    """`Peers` without a supervisor."""

    index: int
    counts: SharedCounts
    name: str = ""
    created: int = 0

    def on_loop_running(self) -> None: ...

    def on_ready(self) -> None: ...

    def on_rejected(self, limit: str) -> None: ...

    async def call(self, method: str, *arguments: Any) -> Any: ...

    async def metrics(self) -> bytes:
        return b""


def test_limits_hold_over_all_front_ends_and_without_one_that_has_ended() -> None:
    counts = SharedCounts(3)
    front_ends = [Admission(10, 100, lambda _: None, FakePeers(i, SharedCounts(3, counts.fd))) for i in range(3)]
    tickets = [admission.admit([20], 3) for admission in front_ends]
    assert counts.total(but=-1) == (3, 9, 60)
    for admission in front_ends:
        with pytest.raises(OverloadedError, match="9 sequences are in flight, this request adds 2"):
            admission.admit([1], 2)
    front_ends[0].admit([40], 1)
    front_ends[1].release(tickets[1])
    front_ends[1].admit([20], 1)
    with pytest.raises(OverloadedError, match="100 prompt tokens are waiting"):
        front_ends[1].admit([1], 1)
    front_ends[2].on_first_token(tickets[2], 0)
    assert counts.total(but=0) == (2, 4, 20)
    counts.show(2, 0, 0, 0)  # the supervisor's part when a front end has ended
    front_ends[1].admit([1], 5)
    assert counts.total(but=-1) == (4, 10, 81)
    front_ends[1].release(tickets[1])
    assert counts.total(but=-1) == (4, 10, 81), "a second release changes nothing"


def test_the_start_is_seen_by_all_front_ends() -> None:
    counts = SharedCounts(2)
    other = SharedCounts(2, counts.fd)
    assert not other.is_started
    counts.start()
    assert other.is_started


@pytest.mark.parametrize(
    "words, message",
    [
        (["--api-server-count=0"], "at least 1"),
        (["--api-server-count=2", "--enable-lora"], "one front end"),
        (["-asc=2", "-tp=2", "--nnodes=2", "--node-rank=1", "--master-addr=h", "--headless"], "serves no API"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as refused:
        ServeArgs.from_argv(["m", *words])
    assert refused.value.argument == "--api-server-count"


def test_process_metrics_are_sums_and_cpu_time_never_falls() -> None:
    pids = [os.getpid(), os.getppid()]
    collector = ProcessesCollector(lambda: pids)

    def values() -> dict[str, float]:
        return {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}

    both = values()
    del pids[0]
    one = values()
    assert one["process_cpu_seconds_total"] >= both["process_cpu_seconds_total"] > 0
    assert one["process_resident_memory_bytes"] < both["process_resident_memory_bytes"]
    assert one["process_start_time_seconds"] >= both["process_start_time_seconds"]
