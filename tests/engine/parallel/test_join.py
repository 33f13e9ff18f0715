"""How ranks that are processes join: by shared memory if all can, otherwise by torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stoker_engine.kernels.cpu.library import library

_RANK = """
import sys
import torch
from stoker_engine.kernels.cpu.library import library
from stoker_engine.parallel.join import join
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.parallel.shm_communicator import SharedMemory

rank, tensor, rendezvous, region = map(int, sys.argv[1:5])
has = sys.argv[5].split(",")[rank]
shared = None if has == "no memory" else SharedMemory(region, library() if has == "kernels" else None)
joined = join(rank, RankLayout(tensor), f"file:///proc/self/fd/{rendezvous}", 60, shared)
groups = joined.groups
total = groups.tensor.all_reduce(torch.full((3,), rank + 1.0)).tolist()
print(type(groups.tensor).__name__, type(groups.engine).__name__, total, flush=True)
joined.close()
"""


@pytest.mark.parametrize(
    "have, kind",
    [
        ("kernels,kernels", "ShmCommunicator"),
        ("kernels,nothing", "TorchCommunicator"),
        pytest.param("nothing,kernels", "TorchCommunicator", marks=pytest.mark.slow),
        pytest.param("no memory,no memory", "TorchCommunicator", marks=pytest.mark.slow),  # without shared memory
    ],
)
def test_ranks_use_shared_memory_only_if_all_can(have: str, kind: str) -> None:
    if library() is None:
        pytest.skip("there are no CPU kernels here")
    rendezvous, region = os.memfd_create("rendezvous"), os.memfd_create("region")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), "2", str(rendezvous), str(region), have],
            pass_fds=(rendezvous, region),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    os.close(rendezvous)
    os.close(region)
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert outputs == [f"{kind} TorchCommunicator [3.0, 3.0, 3.0]\n"] * 2
