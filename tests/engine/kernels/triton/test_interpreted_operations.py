"""Triton's GEMMs and other kernels, in its interpreter; in a separate file, to run concurrently with the others."""

from __future__ import annotations

import pytest

from .interpreter import ATTENTION, FOLDER, MODELS, files, run_interpreted

pytestmark = pytest.mark.timeout(1200)

GEMMS = files("block_experts", "quant_linear", "packed_linear", "packed_experts", "experts", "moe", "route")


def test_gemm_kernels_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    run_interpreted(GEMMS, pytestconfig)


def test_other_kernels_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    run_interpreted(set(FOLDER.glob("test_*.py")) - GEMMS - ATTENTION - MODELS, pytestconfig)
