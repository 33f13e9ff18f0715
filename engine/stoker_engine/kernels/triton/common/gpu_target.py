"""What kernels' tiles are chosen by, beside a layer: whose GPU it is, and what a program may take of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
import triton

from stoker_engine.kernels.triton.common.occupancy import MULTIPROCESSORS


@dataclass(frozen=True)
class GpuTarget:
    """A GPU.

    Attributes:
        shared_bytes: shared memory of a program, at most.
    """

    is_amd: bool
    shared_bytes: int

    @property
    def has_room(self) -> bool:
        """Whether it is one whose tensor cores read from shared memory, of which there is more: Hopper and Blackwell of
        data centres."""
        return not self.is_amd and self.shared_bytes >= 200 << 10

    @classmethod
    def of(cls, target: str) -> Self:
        """One of `MULTIPROCESSORS`; of another name, what every GPU has."""
        least = min(MULTIPROCESSORS.values(), key=lambda unit: unit.shared)
        unit = MULTIPROCESSORS.get(target, least)
        return cls(target.startswith("gfx"), unit.shared - unit.reserved)


def gpu_target_of(device: torch.device) -> GpuTarget:
    """That of a device, or that which kernels are compiled for."""
    if device.type == "cpu":
        return GpuTarget.of("")
    return _of_driver(triton.runtime.driver.active)


@lru_cache(maxsize=1)
def _of_driver(driver: Any) -> GpuTarget:
    target = driver.get_current_target()
    return GpuTarget.of(f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch))
