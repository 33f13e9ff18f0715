"""An image contains a torch for its device, or none."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "images/engine"
sys.path.append(str(FOLDER))  # it imports a module of its folder
settle = SimpleNamespace(**runpy.run_path(str(FOLDER / "settle_torch.py")))


@pytest.mark.parametrize(
    ("device", "cuda", "hip", "output"),
    [
        ("cpu", None, None, ""),
        ("cpu", "13.2", None, ""),
        ("cuda", "13.2", None, ""),
        ("rocm", None, "7.0", ""),
        ("cuda", None, "7.0", "built for ROCm (HIP 7.0), not for cuda"),
        ("cuda", None, None, "built for CPUs, not for cuda"),
        ("rocm", "13.2", None, "built for CUDA 13.2, not for rocm"),
        ("tpu", None, None, "'tpu'; use cpu, cuda or rocm"),
    ],
)
def test_torch_is_built_for_the_device(device: str, cuda: str | None, hip: str | None, output: str) -> None:
    problem = settle.problem(device, cuda=cuda, hip=hip)
    assert output in problem
    assert bool(problem) == bool(output)
