"""The devices and CPUs of each engine of the model. Faked: the machine's accelerators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.parallel import device, processors
from stoker_engine.parallel.processors import Machine
from stoker_engine.processes.device_assignment import VISIBLE, assign_devices, visible_devices


def test_each_engine_has_accelerators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs("m", tensor_parallel_size=2, data_parallel_size=3)
    shown = []
    for engine in range(3):
        monkeypatch.setenv(VISIBLE, "7, 6,5,4,GPU-3,2")
        assign_devices(args, engine)
        shown.append(os.environ[VISIBLE])
    assert shown == ["7,6", "5,4", "GPU-3,2"]


def test_too_few_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    with pytest.raises(ArgumentError, match="the 4 ranks here of 2 engines need 4 devices and 3 are visible"):
        assign_devices(EngineArgs("m", tensor_parallel_size=2, data_parallel_size=2), 1)


def test_an_engine_split_over_nodes_gets_the_remaining_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs("m", tensor_parallel_size=2, data_parallel_size=3, nnodes=2, master_addr="10.0.0.1")
    shown = []
    for engine in range(2):  # the third engine has no rank on this node
        monkeypatch.setenv(VISIBLE, "0,1,2")
        assign_devices(args, engine)
        shown.append(os.environ[VISIBLE])
    assert shown == ["0,1", "2"]


def test_a_single_engine_gets_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3")
    assign_devices(EngineArgs("m"), 0)
    assert os.environ[VISIBLE] == "3"


def test_the_drivers_devices_are_visible_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    for number, gpu_id in enumerate((0, 1234, 77)):  # a processor and two accelerators of AMD's
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
    assert visible_devices(tmp_path) == ["0", "1"]
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_devices(tmp_path) == ["0", "1", "2"]


def test_devices_after_an_invalid_number_are_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0, 2,-1,3")
    assert visible_devices() == ["0", "2"]


@pytest.mark.parametrize(
    "engines, ranks, threads",
    [(2, 1, 2), (3, 1, 1), (5, 1, 1), (2, 2, 8)],
    ids=["two engines", "three engines", "more engines than CPUs", "engines of two ranks"],
)
def test_engines_share_the_cpu_quota(engines: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node with 8 cores and a CPU quota of 4. Ranks choose their own parts."""
    affinity = frozenset(os.sched_getaffinity(0))
    machine = Machine(frozenset(range(8)), quota=4)
    monkeypatch.setattr(Machine, "current", lambda: machine)
    monkeypatch.setattr(processors, "bind", lambda share: bound.append(share.processors))
    monkeypatch.setattr(device, "cpu_quota", lambda: None)
    before = torch.get_num_threads()
    for engine in range(engines):
        bound: list[frozenset[int]] = []
        try:
            torch.set_num_threads(8)
            args = EngineArgs("m", device="cpu", data_parallel_size=engines, tensor_parallel_size=ranks)
            assign_devices(args, engine)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        assert bound == ([machine.allowed] if ranks == 1 else [])
    assert os.sched_getaffinity(0) == affinity
