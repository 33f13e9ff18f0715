"""Triton's kernels in its interpreter, which is chosen when they are decorated: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"
#: What a process runs; all other files are one more.
GROUPS = [
    ["attention", "float8", "kv_store", "latent", "turn_and_store"],
    ["batch_invariant", "models"],
    ["block_experts", "block_product", "experts", "moe", "route"],
]


def files(group: int) -> list[Path]:
    """Of one process."""
    groups = [[HERE / f"test_{name}.py" for name in names] for names in GROUPS]
    named = {file for names in groups for file in names}
    return [*groups, sorted(set(HERE.glob("test_*.py")) - named)][group]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", range(len(GROUPS) + 1))
def test_interpreted(group: int, request: pytest.FixtureRequest) -> None:
    """As many of the slow ones as are asked for here."""
    options = [f"--slow={request.config.getoption('--slow')}", "-m", request.config.getoption("markexpr")]
    command = [sys.executable, "-P", "-m", "pytest", *files(group), "-p", "no:xdist", "-q", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
