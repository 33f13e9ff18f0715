"""Whole models by Triton's kernels, in its interpreter; a file of their own, since workers share out files."""

from __future__ import annotations

import pytest

from .interpreter import MODELS, run_interpreted

pytestmark = pytest.mark.timeout(1200)


def test_models(pytestconfig: pytest.Config) -> None:
    run_interpreted(MODELS, pytestconfig)
