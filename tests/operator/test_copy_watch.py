"""Which copies serve: what engines tell, what those that mean harm can do, and when somebody is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker_operator import copy_watch
from stoker_operator.copy_watch import CopyWatch
from stoker_operator.facts import Copies, Copy, Key

KEY = Key("ns", "demo")


def metrics(*up: int) -> bytes:
    """Of as many copies."""
    lines = []
    for number, each in enumerate(up):
        lines.append(f'stoker:engine_up{{engine="{number}",model_name="m"}} {each}.0')
        cache = f'engine="{number}",kv_cache_size_tokens="{1600 + number}",num_gpu_blocks="{100 + number}"'
        lines.append(f"vllm:cache_config_info{{{cache}}} 1.0")
    return ("\n".join(lines) + "\n").encode()


def copies(*up: int) -> tuple[Copy, ...]:
    return tuple(Copy(number, bool(each), 100 + number, 1600 + number) for number, each in enumerate(up))


class Pod:
    """An engine of a few lines."""

    def __init__(self) -> None:
        self.answers = {"/metrics": metrics(1, 1), "/health": b"all well"}
        self.asked: list[str] = []
        pod = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pod.asked.append(self.path)
                body = pod.answers.get(self.path)
                self.send_response(200 if body is not None else 503)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def pod() -> Iterator[Pod]:
    made = Pod()
    yield made
    made.close()


def ask(pod: Pod) -> Copies | None:
    return asyncio.run(copy_watch.ask(pod.url, 10))


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("not within a minute")


def test_copies_that_serve_say_what_they_have(pod: Pod) -> None:
    assert ask(pod) == Copies(copies(1, 1))
    assert pod.asked == ["/metrics"], "why all is well needs no request"


def test_why_a_copy_does_not_serve_is_what_health_says(pod: Pod) -> None:
    pod.answers |= {
        "/metrics": metrics(1, 0, 1),
        "/health": b"copy 1 of 3: loading again:\n rank 2 of 4 was killed\x07 ",
    }
    assert ask(pod) == Copies(copies(1, 0, 1), "copy 1 of 3: loading again: rank 2 of 4 was killed")
    del pod.answers["/health"]
    assert ask(pod) == Copies(copies(1, 0, 1))


def test_a_copy_may_be_known_by_less(pod: Pod) -> None:
    pod.answers["/metrics"] = b'stoker:engine_up{engine="0"} 1.0\nstoker:engine_up{engine="1"} 0\n'
    found = ask(pod)
    assert found is not None and found.each == (Copy(0, True), Copy(1, False))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'stoker:engine_up{engine="0"} 2.0\n',
        b'stoker:engine_up{engine="-1"} 1.0\n',
        b'stoker:engine_up{engine="999999999999"} 1.0\n',
        b'stoker:engine_up{engine="x"} 1.0\n',
        b"stoker:engine_up 1.0\n",
        b'vllm:cache_config_info{engine="0",num_gpu_blocks="7"} 1.0\n',
    ],
)
def test_nonsense_is_no_copy(pod: Pod, text: bytes) -> None:
    pod.answers["/metrics"] = text
    assert ask(pod) is None


def test_a_liar_costs_little(pod: Pod) -> None:
    pod.answers["/metrics"] = metrics(*([0] * 30_000))
    pod.answers["/health"] = b"x" * 100_000
    found = ask(pod)
    assert found is None or (len(found.each) <= 64 and found.said == "")
    pod.answers |= {"/metrics": metrics(*([0] * 200)), "/health": "\u202e \x00<b>".encode() + b"word " * 1000}
    found = ask(pod)
    assert found is not None and len(found.each) <= 64 and len(found.said) <= 400
    assert found.said.isprintable()


def test_somebody_is_told_when_a_copy_goes_and_when_it_comes(pod: Pod) -> None:
    told: list[Key] = []
    watch = CopyWatch(told.append, every=0.02)
    seen = lambda: watch.copies(KEY, "main", {"a": pod.url})  # noqa: E731
    assert seen() == {}
    wait_for(seen)
    assert seen() == {"a": Copies(copies(1, 1))}
    for up in ((1, 0), (1, 1)):
        before = len(told)
        pod.answers |= {"/metrics": metrics(*up), "/health": b"why"}
        wait_for(lambda before=before: len(told) > before)
        assert [copy.serves for copy in seen()["a"].each] == [bool(each) for each in up]
    quiet, asked = len(told), len(pod.asked)
    wait_for(lambda: len(pod.asked) > asked + 3)
    assert len(told) == quiet, "nothing is new"
    assert set(told) == {KEY}


def test_what_is_silent_is_forgotten_after_a_while(pod: Pod) -> None:
    watch = CopyWatch(lambda _: None, every=0.02)
    wait_for(lambda: watch.copies(KEY, "main", {"a": pod.url}))
    del pod.answers["/metrics"]
    wait_for(lambda: not watch.copies(KEY, "main", {"a": pod.url}))


@pytest.mark.parametrize("end", ["pod", "endpoint", "lead"])
def test_who_is_gone_is_asked_no_more(pod: Pod, end: str) -> None:
    watch = CopyWatch(lambda _: None, every=0.02)
    wait_for(lambda: watch.copies(KEY, "main", {"a": pod.url}))
    if end == "pod":
        assert watch.copies(KEY, "main", {}) == {}
    elif end == "endpoint":
        watch.forget(KEY)
    else:
        watch.forget_all()
    before = -1
    while len(pod.asked) != before:  # one request may be under way
        before = len(pod.asked)
        time.sleep(0.3)


def test_pods_are_asked_once_each_however_often_somebody_looks(pod: Pod) -> None:
    watch = CopyWatch(lambda _: None, every=3600)
    for _ in range(100):
        watch.copies(KEY, "main", {"a": pod.url})
    wait_for(lambda: watch.copies(KEY, "main", {"a": pod.url}))
    assert pod.asked == ["/metrics"]
