"""Triton's GEMMs and other kernels, in its interpreter; in a separate file, to run concurrently with the others."""

from __future__ import annotations

import pytest

from .interpreter import ATTENTION, FOLDER, MODELS, files, run_interpreted

pytestmark = pytest.mark.timeout(1200)

PRODUCTS = files("block_experts", "quant_linear", "experts", "moe", "route")


def test_products(pytestconfig: pytest.Config) -> None:
    run_interpreted(PRODUCTS, pytestconfig)


def test_all_else(pytestconfig: pytest.Config) -> None:
    run_interpreted(set(FOLDER.glob("test_*.py")) - PRODUCTS - ATTENTION - MODELS, pytestconfig)
