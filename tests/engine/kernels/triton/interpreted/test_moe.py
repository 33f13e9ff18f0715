"""The mixture-of-experts layer with Triton's kernels, compared with transformers' routers and experts."""

from __future__ import annotations

import pytest
import torch

from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.layers.build import Build

from ....models.test_moe import CASES, assert_layer_is


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "deepseek_v3")) for name in CASES]
)
def test_moe_layer_equals_that_of_transformers(name: str) -> None:
    assert_layer_is(name, Build(torch.float32, SdpaBackend(), TRITON))
