"""Properties of a GPU by which kernels choose their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
import triton

from stoker_engine.kernels.triton.common.occupancy import MULTIPROCESSORS


@dataclass(frozen=True)
class GpuTarget:
    """Properties of a GPU.

    Attributes:
        is_amd: whether it is an AMD GPU; otherwise NVIDIA.
        shared_bytes: largest shared memory of a program, in bytes.
        has_fp8: whether it has tensor cores for OCP's 8-bit floats; False for AMD's GPUs, of which some have others.
    """

    is_amd: bool
    shared_bytes: int
    has_fp8: bool

    @property
    def has_room(self) -> bool:
        """Whether it is a data-center GPU of Hopper or Blackwell, which have more shared memory, and tensor cores that
        read from it."""
        return not self.is_amd and self.shared_bytes >= 200 << 10

    @classmethod
    def of(cls, target: str) -> Self:
        """Return the properties of a target in `MULTIPROCESSORS`; unknown ones have the least shared memory."""
        least = min(MULTIPROCESSORS.values(), key=lambda unit: unit.shared)
        unit = MULTIPROCESSORS.get(target, least)
        is_amd = target.startswith("gfx")
        has_fp8 = target.startswith("sm_") and int(target.removeprefix("sm_")) >= 89
        return cls(is_amd, unit.shared - unit.reserved, has_fp8)


def gpu_target_of(device: torch.device) -> GpuTarget:
    """Return the properties of a device, or of the target of `compile_only`; a CPU counts as an unknown GPU."""
    if device.type == "cpu":
        return GpuTarget.of("")
    return _of_driver(triton.runtime.driver.active)


@lru_cache(maxsize=1)
def _of_driver(driver: Any) -> GpuTarget:
    target = driver.get_current_target()
    return GpuTarget.of(f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch))
