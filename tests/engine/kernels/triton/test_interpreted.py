"""Triton's kernels in its interpreter, which is chosen when they are decorated: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("part", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(part: str, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-P", "-m", "pytest", HERE, "-p", "no:xdist", "-q", "-m", part]
    slow = request.config.getoption("--slow", default=None)
    options = [f"--slow={slow}"] if part == "slow" and slow else []
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
