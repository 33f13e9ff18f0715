"""Sites with adapters after their matrices are prepacked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.cpu.lora import CpuLoraTable
from stoker_engine.kernels.cpu.matrix import CpuLinear
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.linear_site import LinearSite, SiteForm
from stoker_engine.lora.extension import AdaptedSite
from stoker_engine.quant.weight_target import Shard

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", [SiteForm.LINEAR, SiteForm.EMBEDDING])
@pytest.mark.parametrize("count", [1, 3])
def test_sites_are_settled_if_all_their_operations_are_prepacked(form: SiteForm, count: int) -> None:
    """Only linear sites then use lora.cpp; the others keep their operations."""
    library = cpu_library(CPU, torch.float32)
    if library is None:
        pytest.skip("the CPU kernels do not support this processor")
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    linear = cpu_kernels(library).linear(weight)
    assert isinstance(linear, CpuLinear)
    rows: Any = SimpleNamespace(has_adapters=False)
    where = LinearSite({"w": Shard.whole(8)}, Shard.whole(16), RowSpace.TOKENS, form)
    site = AdaptedSite(where, rows, CPU, CpuLoraTable(1), library)
    # The operations are not prepacked when they are extended; `resolve_prepack` returns what they become.
    unsettled = [SimpleNamespace(now=linear) for _ in range(count)]
    adapted: list[Any] = [site.extended(each) for each in unsettled]  # type: ignore[arg-type]
    site.settle()
    assert [each.operation is not None for each in adapted] == [form is SiteForm.LINEAR] * count
