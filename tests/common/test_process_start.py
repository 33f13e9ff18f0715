"""Start times of processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stoker_common.subprocesses.process_start import process_start

_NOW, _SINCE_BOOT = 1000.0, 5000.0  # the machine slept for 4,000 s, during which the monotonic clock stood still


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: _NOW)
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: _SINCE_BOOT}.__getitem__)


def stat_file(folder: Path, started_s: float) -> Path:
    """Write a stat file of a process that started this long after boot, with parentheses in its name."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    fields[19] = b"%d" % round(started_s * os.sysconf("SC_CLK_TCK"))
    stat = folder / "stat"
    stat.write_bytes(b"1 (a) R 0) " + b" ".join(fields) + b"\n")
    return stat


@pytest.mark.parametrize("age", [0.0, 0.25, 10.0, 900.0])
def test_start_is_on_the_monotonic_clock(tmp_path: Path, age: float) -> None:
    assert process_start(stat_file(tmp_path, _SINCE_BOOT - age)) == pytest.approx(_NOW - age)


def test_start_is_not_in_the_future(tmp_path: Path) -> None:
    assert process_start(stat_file(tmp_path, _SINCE_BOOT + 5)) == _NOW


@pytest.mark.parametrize("content", [None, b"", b"1 (a) R 0", b"1 (a) " + b"x " * 30])
def test_unknown_start_is_now(tmp_path: Path, content: bytes | None) -> None:
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_bytes(content)
    assert process_start(stat) == _NOW
