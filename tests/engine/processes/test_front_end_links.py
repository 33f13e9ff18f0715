"""Links of an engine to several front ends: who receives what, and what a front end that is slow or gone changes."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step_report import FinishedRequest, SchedulerStats, StepReport
from stoker_engine.processes.front_end_links import FrontEndGone, FrontEndLinks
from stoker_engine.processes.messages import Abort, WaitingForNodes

from ...support.waiting import until


class Engine:
    """The engine's side, with front ends as raw pipes."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        passed, received = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._passed = opened.enter_context(passed)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.links = FrontEndLinks(received.detach(), self.inbox)

    def front_end(self) -> Connection:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self._passed, [b"\0"], [theirs.fileno()])
            return self._opened.enter_context(Connection(os.dup(ours.fileno())))

    def receive(self) -> Any:
        return self.inbox.get(timeout=60)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ExitStack() as opened:
        yield Engine(opened)


def _request(request_id: str) -> EngineRequest:
    return EngineRequest(request_id, [1, 2], SamplingParams(), max_tokens=8)


def _outputs(*request_ids: str, finished: tuple[str, ...] = ()) -> StepOutputs:
    return _step([TokenDelta(each, 0, [7]) for each in request_ids], finished)


def _step(deltas: list[TokenDelta], finished: tuple[str, ...] = ()) -> StepOutputs:
    ends = [FinishedRequest(each, FinishReason.LENGTH, 1, 1, 2, 0, 1, 1, 0, 0.0) for each in finished]
    return StepOutputs(deltas, StepReport(1, 0, len(deltas), SchedulerStats(1, 0, 0.0, 0, 0, 0), finished=ends))


def _ids(outputs: StepOutputs) -> list[str]:
    return [delta.request_id for delta in outputs.deltas]


def test_each_front_end_receives_the_deltas_of_its_requests(engine: Engine) -> None:
    first, second = engine.front_end(), engine.front_end()
    for front_end, request_id in ((first, "a"), (second, "b"), (first, "c")):
        front_end.send(_request(request_id))
        assert engine.receive().id == request_id
    rest = engine.links.send(_outputs("a", "b", "unowned", "c", finished=("b",)))
    assert _ids(rest) == ["unowned"]
    assert rest.report is not None, "the supervisor receives the report"
    received = first.recv()
    assert (_ids(received), received.report) == (["a", "c"], None)
    assert _ids(second.recv()) == ["b"]
    assert _ids(engine.links.send(_outputs("a", "b"))) == ["b"], "a finished request has no owner"


def test_the_requests_of_a_front_end_that_ends_are_aborted(engine: Engine) -> None:
    first, second = engine.front_end(), engine.front_end()
    first.send(_request("a"))
    assert engine.receive().id == "a"
    second.send(_request("b"))
    assert engine.receive().id == "b"
    first.send(Abort("a"))
    assert engine.receive() == Abort("a")
    first.close()
    gone = engine.receive()
    assert isinstance(gone, FrontEndGone)
    assert engine.links.forget(gone.link) == ["a"]
    assert engine.links.forget(gone.link) == []
    engine.links.send(_outputs("a", "b"))
    assert _ids(second.recv()) == ["b"]


@pytest.mark.parametrize("data", [b"no pickle", pickle.dumps("no message")])
def test_an_unreadable_message_affects_one_front_end(
    engine: Engine, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = engine.front_end(), engine.front_end()
    bad.send_bytes(data)
    gone = engine.receive()
    engine.links.forget(gone.link)
    with pytest.raises(EOFError):
        bad.recv()
    good.send(_request("a"))
    assert engine.receive().id == "a"
    assert "cannot be read" in caplog.text


def test_a_front_end_that_does_not_read_delays_no_other(engine: Engine) -> None:
    slow, fast = engine.front_end(), engine.front_end()
    slow.send(_request("slow"))
    assert engine.receive().id == "slow"
    fast.send(_request("fast"))
    assert engine.receive().id == "fast"
    tokens = list(range(20_000))  # a pipe takes a few of these messages
    for step in range(40):
        deltas = [TokenDelta("slow", 0, [step, *tokens]), TokenDelta("fast", 0, [step])]
        engine.links.send(_step(deltas))
        assert fast.recv().deltas[0].token_ids == [step]
    assert [slow.recv().deltas[0].token_ids for _ in range(40)] == [[step, *tokens] for step in range(40)]
    engine.links.send(_outputs("slow"))
    assert slow.recv().deltas[0].token_ids == [7], "later messages are sent directly again"


def test_a_request_that_fails_before_its_first_step_has_no_owner(engine: Engine) -> None:
    front_end = engine.front_end()
    front_end.send(_request("a"))
    assert engine.receive().id == "a"
    failed = StepOutputs([TokenDelta("a", 0, [], FinishReason.ERROR)], None)
    assert engine.links.send(failed).deltas == []
    assert _ids(front_end.recv()) == ["a"]
    assert _ids(engine.links.send(failed)) == ["a"]


def test_a_later_front_end_learns_the_current_state(engine: Engine) -> None:
    early = engine.front_end()
    for reason in ("node 1", "node 2"):
        engine.links.report_loading(WaitingForNodes(reason))
    seen: list[str] = []
    until(lambda: early.poll() and not seen.append(early.recv().reason) and seen[-1] == "node 2")
    assert engine.front_end().recv() == WaitingForNodes("node 2")
