"""``stoker serve`` on one of several machines, before the others have joined: its log, and how it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ...support.waiting import until

Start = Callable[..., subprocess.Popen[str]]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command on one of two nodes."""
    with ExitStack() as started:

        def start(words: Sequence[object], **environment: str) -> subprocess.Popen[str]:
            argv = ["serve", *map(str, words), "--tensor-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1"]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker", *argv],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            started.callback(process.communicate)
            started.callback(process.kill)
            return process

        yield start


def test_the_head_names_missing_nodes(start: Start, tiny_llama: Path) -> None:
    port, meeting = _free_port(), _free_port()
    server = start([tiny_llama, "--host=127.0.0.1", f"--port={port}", f"--master-port={meeting}", "--device=cpu"])

    def health() -> str:
        assert server.poll() is None
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=120)
        except httpx.ConnectError:
            return ""
        assert answer.status_code == 503
        return answer.text if "waiting for" in answer.text else ""

    words = until(health, "the head waits for others", every=0.1)
    assert re.search(
        rf"loading: waiting for node 1 of 2 at 127.0.0.1:{meeting}, until [0-9-]{{10}} [0-9:]{{8}} \(--distr", words
    )
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_node_can_be_stopped_while_it_locates_its_model(start: Start, signum: signal.Signals, tmp_path: Path) -> None:
    """The hub accepts the connection, and does not respond."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        node = start(
            ["some/model", "--node-rank=1", "--headless", f"--master-port={_free_port()}"],
            **environment,
            HF_HUB_OFFLINE="0",
        )
        hub.settimeout(120)
        connection, _ = hub.accept()
        node.send_signal(signum)
        assert node.wait(60) == 0
        connection.close()
