"""Which engines serve: reports of engines, limits against malicious ones, and when listeners are notified."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.cluster import engine_watch
from stoker_operator.cluster.engine_watch import EngineWatch
from stoker_operator.objects.facts import EngineStates, Key

from ...support.waiting import until

KEY = Key("ns", "demo")


def engine_states(*up: int) -> tuple[EngineState, ...]:
    """Return engine states, one per argument; those that are 0 lack rank 1."""
    return tuple(
        EngineState(number, bool(each), 2, () if each else (1,), "so it does", 100 + number, 1600 + number)
        for number, each in enumerate(up)
    )


def answer(*up: int) -> bytes:
    return json.dumps([state.to_dict() for state in engine_states(*up)]).encode()


class Pod:
    """A minimal engine."""

    def __init__(self) -> None:
        self.answers = {"/copies": answer(1, 1)}
        self.requests: list[str] = []
        pod = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pod.requests.append(self.path)
                body = pod.answers.get(self.path)
                self.send_response(200 if body is not None else 503)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def pod() -> Iterator[Pod]:
    made = Pod()
    yield made
    made.close()


Watch = Callable[..., EngineWatch]


@pytest.fixture
def watch_with() -> Iterator[Watch]:
    """Create watches that poll nothing after the test: their threads keep running."""
    made: list[EngineWatch] = []

    def make(on_change: Callable[[Key], None] = lambda _: None, every: float = 0.02) -> EngineWatch:
        made.append(EngineWatch(on_change, every))
        return made[-1]

    yield make
    for each in made:
        each.forget_all()


def ask(pod: Pod) -> EngineStates | None:
    return asyncio.run(engine_watch.ask(pod.url, 10))


def test_engine_states_list_present_and_missing_ranks(pod: Pod) -> None:
    assert ask(pod) == EngineStates(engine_states(1, 1))
    pod.answers["/copies"] = answer(1, 0, 1)
    assert ask(pod) == EngineStates(engine_states(1, 0, 1))
    assert pod.requests == ["/copies"] * 2
    del pod.answers["/copies"]
    assert ask(pod) is None


def test_engine_states_need_only_number_and_serves(pod: Pod) -> None:
    pod.answers["/copies"] = b'[{"number": 1, "serves": false}, {"number": 0, "serves": true}, {"number": 2}]'
    found = ask(pod)
    assert found is not None and found.engines == (EngineState(0, True), EngineState(1, False))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[" * 10_000,
        b"\xff\xfe",
        b'[{"number": -1, "serves": true}]',
        b'[{"number": 64, "serves": true}]',
        b'[{"number": 0, "serves": true, "ranks": 65}]',
        b'[{"number": 0, "serves": true, "ranks": 1, "missing_ranks": [0, 0]}]',
        b'[{"number": 0, "serves": true, "kv_blocks": 1000000000000}]',
        b'[{"number": ' + b"9" * 5000 + b', "serves": true}]',
    ],
    ids=lambda text: str(text[:24]),
)
def test_malformed_engine_states_are_ignored(pod: Pod, text: bytes) -> None:
    pod.answers["/copies"] = text
    assert ask(pod) is None


def test_hostile_engine_states_are_bounded(pod: Pod) -> None:
    pod.answers["/copies"] = answer(*([0] * 30_000))
    assert ask(pod) is None
    states = [EngineState(number, False, 4, (3, 99, 3), "\u202e \x00<b>" + "word " * 100) for number in range(80)]
    pod.answers["/copies"] = json.dumps([state.to_dict() for state in states]).encode()
    found = ask(pod)
    assert found is not None and len(found.engines) == 64
    for state in found.engines:
        assert state.missing_ranks == (3,)
        assert len(state.message) <= 400 and state.message.isprintable()


def test_listener_is_notified_when_an_engine_fails_or_returns(pod: Pod, watch_with: Watch) -> None:
    notified: list[Key] = []
    watch = watch_with(notified.append)
    seen = lambda: watch.engine_states(KEY, "main", {"a": pod.url})  # noqa: E731
    assert seen() == {}
    until(seen)
    until(lambda: notified)  # after the state is stored
    assert seen() == {"a": EngineStates(engine_states(1, 1))}
    for up in ((1, 0), (1, 1)):
        before = len(notified)
        pod.answers["/copies"] = answer(*up)
        until(lambda before=before: len(notified) > before)
        assert [engine.serves for engine in seen()["a"].engines] == [bool(each) for each in up]
    quiet, num_requests = len(notified), len(pod.requests)
    until(lambda: len(pod.requests) > num_requests + 3)
    assert len(notified) == quiet, "an unchanged state notifies no listener"
    assert set(notified) == {KEY}


def test_silent_pod_is_forgotten_after_a_while(pod: Pod, watch_with: Watch) -> None:
    watch = watch_with()
    until(lambda: watch.engine_states(KEY, "main", {"a": pod.url}))
    del pod.answers["/copies"]
    until(lambda: not watch.engine_states(KEY, "main", {"a": pod.url}))


@pytest.mark.parametrize("end", ["pod", "endpoint", "lead"])
def test_removed_pods_are_not_polled(pod: Pod, end: str, watch_with: Watch) -> None:
    watch = watch_with()
    until(lambda: watch.engine_states(KEY, "main", {"a": pod.url}))
    if end == "pod":
        assert watch.engine_states(KEY, "main", {}) == {}
    elif end == "endpoint":
        watch.forget(KEY)
    else:
        watch.forget_all()
    loop = watch._loop._loop
    assert loop is not None
    until(lambda: not asyncio.all_tasks(loop), "a pod is still watched")  # one request may be in flight


def test_reads_do_not_poll_pods_more_often(pod: Pod, watch_with: Watch) -> None:
    watch = watch_with(every=3600)
    for _ in range(100):
        watch.engine_states(KEY, "main", {"a": pod.url})
    until(lambda: watch.engine_states(KEY, "main", {"a": pod.url}))
    assert pod.requests == ["/copies"]
