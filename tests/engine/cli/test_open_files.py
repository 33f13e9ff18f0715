"""The limit of open files of a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import logging, resource, sys
from stoker_engine.cli.open_files import raise_limit
logging.basicConfig(level=logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    "soft, hard, raised", [(100, 3000, 3000), (3000, 3000, 3000), (2000, 2001, 2001)], ids=["raised", "equal", "close"]
)
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int, raised: int) -> None:
    program = _PROGRAM.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(raised), str(hard)]
    assert (f"from {soft} to {raised}" in done.stderr) is (soft != raised)
