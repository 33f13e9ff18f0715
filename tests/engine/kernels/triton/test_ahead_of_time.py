"""Triton's kernels compiled for other GPUs: they spill no registers, use tensor cores, and need the table's resources.

The table is the output of `python -m stoker_engine.kernels.triton.compile.ahead_of_time`, with the compiler of
constraints.txt.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from stoker_engine.kernels.triton.compile.ahead_of_time import TARGETS, compiled, kernel_variants

TABLE = Path(__file__).with_name("resources.jsonl")
#: Largest shared memory of a program in KiB: CUDA C++ Programming Guide, "Compute Capabilities"; AMD's LDS.
SHARED = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx90a": 64, "gfx942": 64,
    "gfx950": 160,
}  # fmt: skip
#: Tolerated spilled bytes per thread. On an H200 these tiles were the fastest for heads of 256. Smaller tiles of scaled
#: groups would not spill on sm_100, but would load more for each product on all targets.
SPILLED = {
    ("attention chunk 256 bf16", "sm_90"): 16, ("attention chunk 256 bf16", "sm_100"): 24,
    ("attention chunk 64 bf16", "sm_100"): 8, ("attention decode 256 bf16", "sm_80"): 8,
    ("attention decode 128 fp16, all a layer may have", "sm_80"): 16,
    ("w8a8_gemm e4m3 in groups, 1024 tokens", "sm_100"): 104,
    ("w8a8_gemm e4m3 in groups, odd size, 1024 tokens", "sm_100"): 136,
    ("grouped_packed_gemm Q6_K bf16", "sm_100"): 24,
}  # fmt: skip
VARIANTS = {target: kernel_variants(target) for target in TARGETS}


def table() -> dict[tuple[str, str], dict[str, Any]]:
    lines = map(json.loads, TABLE.read_text().strip("\n").split("\n"))
    return {(each["kernel"], each["target"]): each for each in lines}


def check(kernel: str, target: str) -> None:
    found = compiled(VARIANTS[target][kernel], target)
    assert json.loads(json.dumps(asdict(found))) == table()[kernel, target]


def test_every_kernel_fits_every_gpu() -> None:
    known = table()
    assert known.keys() == {(kernel, target) for target in TARGETS for kernel in VARIANTS[target]}
    for (kernel, target), each in known.items():
        assert each["spilled"] <= SPILLED.get((kernel, target), 0), each
        assert each["shared"] <= SHARED[target] << 10, each
        assert bool(each["tensor_cores"]) or not VARIANTS[target][kernel].tensor_cores, each
    assert "wgmma.mma_async" in known["attention chunk 128 bf16", "sm_90"]["tensor_cores"]


@pytest.mark.parametrize(
    ("kernel", "target"),
    [("attention decode 128 bf16", "sm_90"), ("attention chunk 64 bf16", "gfx942"), ("kv_store e4m3", "sm_80")],
)
def test_selected_kernels_match_the_table(kernel: str, target: str) -> None:
    check(kernel, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels_match_the_table(target: str) -> None:
    for kernel in VARIANTS[target]:
        check(kernel, target)
