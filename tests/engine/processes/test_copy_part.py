"""Which part of a machine each copy of the model has. Pretended: the machine's accelerators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ArgumentError
from stoker_engine.processes.copy_part import VISIBLE, keep_to_own_part, visible_devices


def test_each_copy_has_accelerators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs("m", tensor_parallel_size=2, data_parallel_size=3)
    shown = []
    for copy in range(3):
        monkeypatch.setenv(VISIBLE, "7, 6,5,4,GPU-3,2")
        keep_to_own_part(args, copy)
        shown.append(os.environ[VISIBLE])
    assert shown == ["7,6", "5,4", "GPU-3,2"]


def test_too_few_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    with pytest.raises(ArgumentError, match="2 copies of 2 ranks need 4 devices and 3 are visible"):
        keep_to_own_part(EngineArgs("m", tensor_parallel_size=2, data_parallel_size=2), 1)


def test_one_copy_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3")
    keep_to_own_part(EngineArgs("m"), 0)
    assert os.environ[VISIBLE] == "3"


def test_what_the_driver_shows_counts_where_nobody_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices(tmp_path) == ["0", "1", "2"]


def test_processors_are_dealt_among_copies() -> None:
    before = os.sched_getaffinity(0)
    try:
        parts = []
        for copy in range(2):
            os.sched_setaffinity(0, before)
            keep_to_own_part(EngineArgs("m", device="cpu", data_parallel_size=2), copy)
            parts.append(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, before)
    assert parts[0] and parts[1]
    assert parts[0] | parts[1] <= before
    assert len(before) < 2 or parts[0] != parts[1]
