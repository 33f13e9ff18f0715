"""Whole models with Triton's kernels, in its interpreter; in a separate file, because workers take whole files."""

from __future__ import annotations

import pytest

from .interpreter import MODELS, run_interpreted

pytestmark = pytest.mark.timeout(1200)


def test_models_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    run_interpreted(MODELS, pytestconfig)
