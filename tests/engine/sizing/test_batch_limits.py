"""Default limits of a step: every class of devices, and the memory sizes between them."""

from __future__ import annotations

import pytest

from stoker_engine.sizing.batch_limits import BatchLimits, default_batch_limits

GIB = 1 << 30
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def limits(memory_bytes: int, name: str = H100, *, unbounded: bool = False, on_cpu: bool = False) -> BatchLimits:
    return default_batch_limits(memory_bytes, name, on_cpu=on_cpu, unbounded_prompts=unbounded)


@pytest.mark.parametrize(
    ("memory_bytes", "server", "offline"),
    [
        (0, (256, 2048), (256, 8192)),
        (24 * GIB, (256, 2048), (256, 8192)),
        (70 * GIB - 1, (256, 2048), (256, 8192)),
        (70 * GIB, (1024, 8192), (1024, 16384)),
        (160 * GIB - 1, (1024, 8192), (1024, 16384)),
        (160 * GIB, (1024, 16384), (1024, 16384)),
        (1000 * GIB, (1024, 16384), (1024, 16384)),
    ],
)
def test_limits_follow_the_memory(memory_bytes: int, server: tuple[int, int], offline: tuple[int, int]) -> None:
    assert limits(memory_bytes) == BatchLimits(*server)
    assert limits(memory_bytes, unbounded=True) == BatchLimits(*offline)


@pytest.mark.parametrize("name", [A100, A100.lower(), "nvidia-a100-80gb", "NVIDIA A100 80GB PCIe"])
def test_a100_has_the_limits_of_smaller_gpus(name: str) -> None:
    assert limits(80 * GIB, name) == BatchLimits(256, 2048)
    assert limits(80 * GIB, name, unbounded=True) == BatchLimits(256, 8192)


@pytest.mark.parametrize("memory_bytes", [0, 70 * GIB, 1000 * GIB])
@pytest.mark.parametrize("unbounded", [False, True])
def test_cpus_have_the_same_limits_with_any_memory(memory_bytes: int, unbounded: bool) -> None:
    assert limits(memory_bytes, "CPU", unbounded=unbounded, on_cpu=True) == BatchLimits(256, 2048)
