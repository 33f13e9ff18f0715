"""Tests of Triton's kernels in its interpreter, in their own process: it is selected when kernels are decorated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def files(*names: str) -> set[Path]:
    return {FOLDER / f"test_{name}.py" for name in names}


#: Files that run concurrently with all others.
ATTENTION = files("attention", "float8", "kv_store", "latent", "packages", "rope_and_cache")
MODELS = files("batch_invariant", "models")


def run_interpreted(tests: set[Path], config: pytest.Config) -> None:
    """Run the tests, with the same selection of slow tests as in this process."""
    # A test takes minutes in the interpreter; the calling test has the time limit.
    options = [f"--slow={config.getoption('--slow')}", "-m", config.getoption("markexpr"), "--timeout=0"]
    command = [sys.executable, "-P", "-m", "pytest", *sorted(tests), "-p", "no:xdist", "-q", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
