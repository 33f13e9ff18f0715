"""Assigns parts of this machine to the engines of the model: to each as many accelerators as it has ranks here, in the
order of engines, or a share of the processors. If an engine has several ranks, these take their shares of the
processors themselves."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.nodes.placement import RankPlacement
from stoker_engine.parallel.processors import take_share

#: Environment variable that CUDA and ROCm read once at their start.
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def assign_devices(args: EngineArgs, engine: int) -> None:
    """Hide other engines' accelerators from this process; without accelerators, limit the process of an engine with one
    rank to its share of the processors. Does nothing if the engine does not share node 0 with another one.

    Must be called on node 0, before CUDA or compute threads start.

    Raises:
        ArgumentError: there are accelerators, but fewer than node 0 has ranks.
    """
    placement = RankPlacement.of(args)
    local_engines = placement.engines_on(0)
    if len(local_engines) == 1 or engine not in local_engines:
        return
    visible = [] if args.device == "cpu" else visible_devices()
    if not visible:  # the engines run on the CPU, or fail later because of a missing device
        if placement.size == 1:
            from stoker_engine.parallel.device import limit_threads  # torch

            limit_threads(take_share(*placement.neighbours(engine, 0), on_cpu=True).threads)
        return
    needed, first = placement.neighbours(engine, 0)
    if len(visible) < needed:
        raise ArgumentError(
            "--data-parallel-size",
            f"the {needed} ranks here of {len(local_engines)} engines need {needed} devices and {len(visible)} are "
            f"visible; reduce the number of engines, or make more devices visible",
        )
    # The last engine's other ranks may be on the next node.
    os.environ[VISIBLE] = ",".join(visible[first : first + len(placement.ranks_on(0, engine))])


def visible_devices(system: Path = Path("/")) -> list[str]:
    """Return the accelerators that CUDA or ROCm would show to this process.

    Args:
        system: root of the file system in which drivers list their devices.
    """
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it
    found = [path.name.removeprefix("nvidia") for path in (system / "dev").glob("nvidia[0-9]*")]
    nodes = (system / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    found = found or [path.parent.name for path in nodes if path.read_text().strip() != "0"]
    return [str(device) for device in range(len(found))]
