"""Attention by Triton's kernels, and whole models, in its interpreter."""

from __future__ import annotations

import pytest

from .interpreter import ATTENTION, MODELS, run_interpreted

pytestmark = pytest.mark.timeout(1200)


def test_attention(pytestconfig: pytest.Config) -> None:
    run_interpreted(ATTENTION, pytestconfig)


def test_models(pytestconfig: pytest.Config) -> None:
    run_interpreted(MODELS, pytestconfig)
