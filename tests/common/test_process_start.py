"""When a process started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker_common.subprocesses.process_start import process_start

_PROGRAM = "from stoker_common.subprocesses.process_start import process_start; print(process_start())"


def test_start_of_a_child_lies_between_the_moments_around_it() -> None:
    before = time.monotonic()
    output = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout
    assert before - 0.02 <= float(output) <= time.monotonic()  # to a clock tick


def test_start_stays_the_same() -> None:
    first = process_start()
    time.sleep(0.05)
    assert abs(process_start() - first) < 0.02


def test_start_is_read_behind_a_name_with_parentheses(tmp_path: Path) -> None:
    fields = Path("/proc/self/stat").read_bytes()
    stat = tmp_path / "stat"
    stat.write_bytes(b"1 (a) R 0) " + fields.rpartition(b") ")[2])
    assert abs(process_start(stat) - process_start()) < 0.02


@pytest.mark.parametrize("content", [None, b"", b"1 (a) R 0", b"1 (a) " + b"x " * 30])
def test_start_that_is_not_known_is_now(tmp_path: Path, content: bytes | None) -> None:
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_bytes(content)
    before = time.monotonic()
    assert before <= process_start(stat) <= time.monotonic()
