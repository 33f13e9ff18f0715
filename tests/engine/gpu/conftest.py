"""Engines on a GPU, whose memory has no pages that can be made inaccessible (see `support.engine.guarded_cache`)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def guarded_cache() -> None:
    """No guards."""
