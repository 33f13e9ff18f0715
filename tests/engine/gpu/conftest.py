"""Engines on a GPU: its memory has no pages that could be made inaccessible (`../guarded_cache.py`)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def guarded_cache() -> None:
    """There is none."""
