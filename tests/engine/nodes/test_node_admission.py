"""Which nodes a head admits, by arguments, version, model and key, and nodes that do not arrive in time."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from typing import Any

import pytest

from stoker_common.errors import (
    ArgumentError,
    EngineDeadError,
)
from stoker_engine.nodes import node_info
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.nodes.handshake import greet_head
from stoker_engine.nodes.head import Head

from ...support.waiting import until
from .conftest import Nodes, is_listening, run_steps


def test_a_second_node_of_the_same_number_waits(nodes: Nodes) -> None:
    nodes.agent()
    executor = nodes.executor()
    second = nodes.agent(distributed_timeout_seconds=2)
    error = second.end()
    assert isinstance(error, EngineDeadError) and "node 1 (127.0.0.1) is already connected" in str(error)
    run_steps(executor, 3)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_num_seqs": 7}, r"--max-num-seqs: .*unset on node 0, but 7 on node 1"),
        ({"nnodes": 4, "node_rank": 1}, r"--nnodes: .*2 on node 0, but 4 on node 1"),
    ],
)
def test_nodes_must_have_the_same_arguments(options: dict[str, Any], words: str, nodes: Nodes) -> None:
    agent = nodes.agent(**options)
    with pytest.raises(ArgumentError, match=words.replace(".*", "")):
        nodes.executor()
    error = agent.end()
    assert isinstance(error, ArgumentError) and re.search(words, str(error))


def test_scheduling_arguments_of_the_head_may_differ(nodes: Nodes) -> None:
    """`LLM` on the head, which is offline, and ``stoker serve --headless`` on other nodes differ in them."""
    nodes.agent(long_prefill_token_threshold=0)
    executor = nodes.executor()
    run_steps(executor, 2)


def test_nodes_must_have_the_same_version_and_model(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    other_model = nodes.model.with_name("other")
    other_model.mkdir()
    (other_model / "config.json").write_text('{"x": 1}')
    agent = nodes.agent(model=str(other_model))
    with pytest.raises(ArgumentError, match="MODEL: the files on node 1"):
        nodes.executor()
    assert isinstance(agent.end(), ArgumentError)
    own_version = node_info.version("stoker")
    versions = iter([own_version, "0.0.1"])  # the head's is read first
    monkeypatch.setattr(node_info, "version", lambda _: next(versions))
    threading.Timer(0.5, nodes.agent).start()
    with pytest.raises(ArgumentError, match=f"has Stoker 0.0.1, and node 0 has {own_version}"):
        nodes.executor()


def test_nodes_with_another_key_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head keeps waiting for a node with the right key."""
    monkeypatch.setenv("STOKER_NODE_KEY", "the right one")
    found: list[BaseException | None] = []

    def begin() -> None:
        until(lambda: is_listening(nodes.port), "the head listens")
        for key in ("the wrong one", ""):
            monkeypatch.setenv("STOKER_NODE_KEY", key)
            found.append(nodes.agent().end())
        monkeypatch.setenv("STOKER_NODE_KEY", "the right one")
        nodes.agent()

    beginning = threading.Thread(target=begin)
    beginning.start()
    executor = nodes.executor()
    beginning.join()
    run_steps(executor, 3)
    assert len(found) == 2
    for error in found:
        assert isinstance(error, ArgumentError) and "STOKER_NODE_KEY: node 0 at 127.0.0.1" in str(error)


def test_missing_nodes_are_reported_after_the_timeout(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        EngineDeadError,
        match=r"node 1 of 2 did not connect to .*:[0-9]+ within 1 s \(--distributed-t",
    ):
        nodes.executor(distributed_timeout_seconds=1)
    error = nodes.agent(distributed_timeout_seconds=1).end()
    assert isinstance(error, EngineDeadError)
    assert re.search(rf"node 0 at 127.0.0.1:{nodes.port} could not be reached .*Connection refused", str(error))


def test_a_node_that_connects_while_the_head_closes_is_disconnected(nodes: Nodes) -> None:
    """A stopping head must not admit a node that it will never end."""
    head = nodes.head()
    line = NodeConnection(socket.create_connection(("127.0.0.1", nodes.port), 120))
    try:
        greet_head(line, b"")
        head.close()
        line.wait_at_most(120)
        with pytest.raises((EOFError, ConnectionError)):
            line.send(
                node=1, path="", **dataclasses.asdict(node_info.NodeInfo.of(nodes.args(node_rank=1), nodes.model))
            )
            line.receive()
    finally:
        line.close()


def test_a_master_port_in_use_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.nodes.head._PORT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", nodes.port)),
        pytest.raises(ArgumentError, match=f"--master-port: node 0 cannot listen on 127.0.0.1:{nodes.port}: .*in use"),
    ):
        nodes.executor()


def test_only_node_0_runs_an_engine(nodes: Nodes) -> None:
    with pytest.raises(ArgumentError, match="--node-rank: node 0 runs the engine"):
        Head.of(nodes.args(node_rank=1), nodes.model)
