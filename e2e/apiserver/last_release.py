"""The last release: the sources of the newest tag `v*` in the history of the commit under test."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("common", "engine", "operator", "gateway", "cli")


def export(folder: Path) -> Path:
    """Write the release's sources and its CustomResourceDefinition to `folder`; skip the test if there is no tag."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match=v[0-9]*"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(
            "this clone has no tag of a release before its commit; if there is one: git fetch --tags --unshallow"
        )
    archive = ["git", "archive", found.stdout.strip(), *SOURCES, "crds"]
    content = subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        files.extractall(folder, filter="data")
    return folder


def python_path(folder: Path) -> str:
    """Return the PYTHONPATH with which an exported release runs instead of the sources under test."""
    return os.pathsep.join(str(folder / each) for each in SOURCES)
