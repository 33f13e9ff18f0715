"""Placement of ranks: each is on one node, nodes have equal numbers, and a node's placement agrees with the head's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.nodes.placement import RankPlacement

LAYOUTS = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.integers(1, 12)).filter(
    lambda drawn: drawn[0] * drawn[1] * drawn[2] % drawn[3] == 0
)


def _args(tensor: int, stages: int, engines: int, nodes: int, **options: Any) -> EngineArgs:
    return EngineArgs(
        "m",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        data_parallel_size=engines,
        nnodes=nodes,
        **{"master_addr": "10.0.0.1", **options},
    )


@given(LAYOUTS)
def test_every_rank_is_on_one_node(layout: tuple[int, int, int, int]) -> None:
    tensor, stages, engines, nodes = layout
    placement = RankPlacement.of(_args(*layout))
    dealt = [
        (engine, rank, node)
        for node in range(nodes)
        for engine in placement.engines_on(node)
        for rank in placement.ranks_on(node, engine)
    ]
    assert [rank[:2] for rank in dealt] == [
        (engine, rank) for engine in range(engines) for rank in range(tensor * stages)
    ]
    assert all(placement.node_of(engine, rank) == node for engine, rank, node in dealt)
    assert {sum(each[2] == node for each in dealt) for node in range(nodes)} == {tensor * stages * engines // nodes}
    for engine in range(engines):
        assert list(placement.nodes_of(engine)) == sorted({node for which, _, node in dealt if which == engine})


@given(LAYOUTS)
def test_ranks_of_a_node_have_distinct_local_ranks(layout: tuple[int, int, int, int]) -> None:
    """Each rank of a node has a different local rank; all local ranks are used."""
    tensor, stages, engines, nodes = layout
    placement = RankPlacement.of(_args(*layout))
    found: dict[int, list[tuple[int, int]]] = {}
    for engine in range(engines):
        for rank in range(tensor * stages):
            found.setdefault(placement.node_of(engine, rank), []).append(placement.neighbours(engine, rank))
    on_each = tensor * stages * engines // nodes
    assert found == {node: [(on_each, index) for index in range(on_each)] for node in range(nodes)}


def test_engines_stay_on_one_node_if_they_fit_otherwise_stages_are_split() -> None:
    whole = RankPlacement.of(_args(2, 1, 2, 2))
    assert [whole.nodes_of(engine) for engine in range(2)] == [range(1), range(1, 2)]
    stages = RankPlacement.of(_args(2, 2, 1, 2))
    assert [stages.ranks_on(node, 0) for node in range(2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"nodes": 3, "tensor": 2}, "--nnodes: 2 ranks .* cannot be distributed equally over 3 nodes.*choose"),
        ({"nodes": 0}, "--nnodes: must be at least 1"),
        ({"node_rank": 2}, "--node-rank: must be 0 to 1, as there are 2 nodes"),
        ({"node_rank": -1}, "--node-rank: must be 0 to 1"),
        ({"nodes": 1, "node_rank": 1}, "--node-rank: must be 0 to 0, as there is one node"),
        ({"master_addr": None}, "--master-addr: is required with several nodes"),
        ({"master_addr": ""}, "--master-addr: is required with several nodes"),
        ({"master_addr": "0.0.0.0"}, "--master-addr: 0.0.0.0 is not an address to which other nodes can connect"),
        ({"master_addr": "::"}, "--master-addr: :: is not an address to which other nodes can connect"),
        (
            {"master_addr": "10.0.0.1:29501"},
            "--master-addr: '10.0.0.1:29501' is neither an address nor a name.*port with --master-port",
        ),
        ({"master_addr": "[fd00::1]"}, "--master-addr: .* is neither an address nor a name; omit brackets"),
        ({"master_addr": "head..svc"}, "--master-addr: .* is neither an address nor a name"),
        ({"master_addr": "h" * 64}, "--master-addr: .* is neither an address nor a name"),
        ({"master_addr": "head\0"}, "--master-addr: .* is neither an address nor a name"),
        ({"master_addr": "tcp://head"}, "--master-addr: 'tcp://head' is neither an address nor a name"),
        ({"master_port": 0}, "--master-port: ports are 1 to 65535, got 0"),
        ({"master_port": 65535, "engines": 2}, "--master-port: .*got 65535 to 65536"),
        ({"distributed_timeout_seconds": 0}, "--distributed-timeout-seconds: must be at least 1"),
    ],
)
def test_impossible_placements_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        _args(**{"tensor": 2, "stages": 1, "engines": 1, "nodes": 2, **options})


@pytest.mark.parametrize(
    "words, refusal",
    [
        (["--headless"], "--headless: node 0 serves the API"),
        (["--headless", "--nnodes=2", "--master-addr=a"], "--headless: node 0 serves the API"),
        (["--node-rank=1", "--nnodes=2", "--master-addr=a"], "--node-rank: only node 0 serves the API.*add --headless"),
    ],
)
def test_only_node_0_serves_the_api(words: list[str], refusal: str) -> None:
    with pytest.raises(ArgumentError, match=refusal):
        ServeArgs.from_argv(["m", "--tensor-parallel-size=2", *words])


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "fe80::1%eth0", "localhost", "head-0.heads.here.svc"])
def test_master_addr_may_be_an_address_or_a_name(address: str) -> None:
    assert _args(2, 1, 1, 2, master_addr=address).master_addr == address


def test_arguments_survive_a_round_trip_through_flags() -> None:
    words = ["m", "--tensor-parallel-size=2", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--headless"]
    args = ServeArgs.from_argv(words)
    assert (args.engine.nnodes, args.engine.node_rank, args.engine.master_port) == (2, 1, 29501)
    assert ServeArgs.from_argv(args.to_argv()) == args
