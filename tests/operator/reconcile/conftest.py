"""What tests of a reconcile share."""

from __future__ import annotations

from typing import Any

import pytest

from .fake_cluster import World


@pytest.fixture
def world(document: Any) -> World:
    return World(document())
