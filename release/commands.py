"""Running other programs: their output is shown only if they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from release.errors import ReleaseError

#: uv is installed beside this Python by `make setup`.
UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output; an error with all of its output if it fails.

    Args:
        environment: variables in addition to this process's.
    """
    words = list(map(str, command))
    try:
        done = subprocess.run(words, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    except FileNotFoundError:
        raise ReleaseError(f"{words[0]} is not installed; run `make setup`") from None
    if done.returncode:
        raise ReleaseError(f"`{' '.join(words)}` failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout
