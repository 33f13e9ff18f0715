"""Starts the ranks of an engine, as processes of this node or by the agents of other nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.rank import Rank
from stoker_engine.exec.rank_messages import Setup
from stoker_engine.exec.rank_process import RankProcess
from stoker_engine.exec.remote_rank import RemoteRank
from stoker_engine.exec.supervision import Supervision
from stoker_engine.nodes.head import Head
from stoker_engine.nodes.placement import RankPlacement
from stoker_engine.parallel.layout import RankLayout


@contextmanager
def start_ranks(
    args: EngineArgs,
    ranks: list[Rank],
    timeout_s: float,
    supervision: Supervision,
    head: Head | None,
    program: Sequence[str],
    on_wait: Callable[[], None],
) -> Iterator[None]:
    """Start all ranks. The rendezvous exists until the context ends.

    Args:
        ranks: list to append each started rank to, so that the caller can end them after an error.
        timeout_s: how long a rank waits for another, in seconds.
        head: the engine's head; None: all ranks are processes of this node.
        program: program of local ranks; see `RankProcess`.
        on_wait: called regularly while other nodes connect and start ranks.

    Raises:
        ArgumentError: this node has too few devices, or another node does not match.
        EngineDeadError: other nodes did not connect in time, or cannot start a rank.
        OSError: the system has no processes or memory left.
    """
    if head is None:
        with _start_local_ranks(args, ranks, timeout_s, supervision, program):
            yield
    else:
        with _start_ranks_on_nodes(args, ranks, timeout_s, supervision, head, program, on_wait):
            yield


@contextmanager
def _start_local_ranks(
    args: EngineArgs, ranks: list[Rank], timeout_s: float, supervision: Supervision, program: Sequence[str]
) -> Iterator[None]:
    """Start all ranks on this node. On CPUs, the ranks of a stage share memory."""
    from stoker_engine.parallel.device import (  # imports torch, which not all importers of this module need
        check_devices,
        resolve_device,
    )

    layout, device, placement = RankLayout.of(args), resolve_device(args), RankPlacement.of(args)
    check_devices(device, layout.size)
    on_cpu = device.type == "cpu"
    with ExitStack() as files:
        rendezvous = files.enter_context(_memory()).fileno()
        regions = [files.enter_context(_memory()).fileno() for _ in range(layout.pipeline)]
        for rank_index in range(layout.size):
            region = regions[layout.stage_of(rank_index).index]
            setup = Setup(
                rank_index,
                layout,
                f"file:///proc/self/fd/{rendezvous}",
                timeout_s,
                placement.neighbours(supervision.engine or 0, rank_index),
                on_cpu,
                region if on_cpu else None,
                supervision.labels,
                device=rank_index,
            )
            ranks.append(RankProcess(setup, [rendezvous, region], supervision.log_format, program))
        yield


@contextmanager
def _start_ranks_on_nodes(
    args: EngineArgs,
    ranks: list[Rank],
    timeout_s: float,
    supervision: Supervision,
    head: Head,
    program: Sequence[str],
    on_wait: Callable[[], None],
) -> Iterator[None]:
    """Start the ranks on their nodes. Ranks share no memory region, even within one node."""
    from stoker_engine.parallel.device import check_devices, resolve_device
    from stoker_engine.parallel.rendezvous import rendezvous_at

    layout, placement, device = RankLayout.of(args), head.placement, resolve_device(args)
    local_ranks = placement.ranks_on(0, head.engine)
    if local_ranks:
        check_devices(device, len(local_ranks))
    on_cpu = device.type == "cpu"
    with rendezvous_at(head.address) as rendezvous:
        nodes = head.nodes(on_wait)
        for rank_index in range(layout.size):
            on_wait()
            neighbours = placement.neighbours(head.engine, rank_index)
            setup = Setup(
                rank_index,
                layout,
                rendezvous,
                timeout_s,
                neighbours,
                on_cpu,
                labels=supervision.labels,
                device=local_ranks.index(rank_index) if rank_index in local_ranks else neighbours[1],
            )
            if rank_index in local_ranks:
                ranks.append(RankProcess(setup, (), supervision.log_format, program))
            else:
                ranks.append(RemoteRank(setup, nodes[placement.node_of(head.engine, rank_index)]))
        yield


def _memory() -> BinaryIO:
    """Create anonymous memory, which is freed with the last process that has it open."""
    return os.fdopen(os.memfd_create("stoker-ranks"), "rb")
