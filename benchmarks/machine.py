"""Ceilings of this machine, as the reference of measured speeds."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Facts and ceilings of a machine, measured with torch.

    The ceilings are sustained for a second, as workloads require; on a machine that shares its processor or power
    limit, bursts can be two or three times faster.

    Attributes:
        read_bytes: bytes/s of memory reads, by the sum of a tensor larger than all caches.
        gemm_flops: FLOP/s of a large bfloat16 GEMM.
    """

    name: str
    cpus: int
    read_bytes: float
    gemm_flops: float

    @classmethod
    def measure(cls) -> Machine:
        """Measure this machine, in a few seconds."""
        words = torch.ones(1 << 27, dtype=torch.int64)  # 1 GiB
        a, b = (torch.randn(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
        read = words.nbytes / _kept_up(lambda: words.sum())
        return cls(cpu_name(), os.cpu_count() or 1, read, 2 * 2048**3 / _kept_up(lambda: a @ b))

    def better(self, other: Machine) -> Machine:
        """Return the higher ceilings of two measurements; other load only lowers them."""
        read, gemm = max(self.read_bytes, other.read_bytes), max(self.gemm_flops, other.gemm_flops)
        return replace(self, read_bytes=read, gemm_flops=gemm)

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.cpus} CPUs, torch {torch.__version__}, Python {platform.python_version()}; "
            f"memory read {self.read_bytes / 1e9:.1f} GB/s, bfloat16 GEMM {self.gemm_flops / 1e9:.0f} GFLOP/s"
        )


def _kept_up(run: Callable[[], object], seconds: float = 1) -> float:
    """Return the seconds per call, over calls that last `seconds`, after a warm-up."""
    run()
    started, times = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < seconds:
        run()
        times += 1
    return taken / times


def cpu_name() -> str:
    """Return the processor's model name, and the instruction set to which Stoker's kernels are restricted, if any."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    isa = os.environ.get("STOKER_NATIVE_KERNELS") or "1"
    return name if isa == "1" else f"{name} restricted to {isa}"
