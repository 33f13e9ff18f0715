"""Shared fixtures of the reconcile tests."""

from __future__ import annotations

from typing import Any

import pytest

from .fake_cluster import World


@pytest.fixture
def world(document: Any) -> World:
    return World(document())
