"""Attention by Triton's kernels, in its interpreter."""

from __future__ import annotations

import pytest

from .interpreter import ATTENTION, run_interpreted

pytestmark = pytest.mark.timeout(1200)


def test_attention_kernels_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    run_interpreted(ATTENTION, pytestconfig)
