"""Occupancy: the share of a multiprocessor's warps that a kernel can use. More warps hide more memory latency.

Limits: NVIDIA's CUDA C++ Programming Guide ("Compute Capabilities") and AMD's CDNA instruction set guides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Multiprocessor:
    """A streaming multiprocessor, or a compute unit.

    Attributes:
        warps: largest number of resident warps.
        programs: largest number of resident programs.
        registers: number of 32-bit registers of all threads.
        register_unit: allocation unit of a warp's registers.
        shared: shared memory in bytes.
        reserved: shared memory in bytes that the system takes for each program.
        threads: threads of a warp.
    """

    warps: int
    programs: int
    registers: int
    register_unit: int
    shared: int
    reserved: int
    threads: int = 32


_KIB: Final = 1024
_CDNA: Final = {"warps": 32, "programs": 32, "registers": 4 * 512 * 64, "register_unit": 8 * 64, "reserved": 0}

MULTIPROCESSORS: Final = {
    "sm_80": Multiprocessor(64, 32, 65536, 256, 164 * _KIB, _KIB),
    "sm_86": Multiprocessor(48, 16, 65536, 256, 100 * _KIB, _KIB),
    "sm_89": Multiprocessor(48, 24, 65536, 256, 100 * _KIB, _KIB),
    "sm_90": Multiprocessor(64, 32, 65536, 256, 228 * _KIB, _KIB),
    "sm_100": Multiprocessor(64, 32, 65536, 256, 228 * _KIB, _KIB),
    "sm_120": Multiprocessor(48, 24, 65536, 256, 100 * _KIB, _KIB),
    "gfx90a": Multiprocessor(shared=64 * _KIB, threads=64, **_CDNA),
    "gfx942": Multiprocessor(shared=64 * _KIB, threads=64, **_CDNA),
    "gfx950": Multiprocessor(shared=160 * _KIB, threads=64, **_CDNA),
}


def occupancy(target: str, warps: int, registers: int, shared: int) -> float:
    """Return the fraction of a multiprocessor's warps that a kernel's concurrent programs occupy.

    Args:
        warps: warps of a program.
        registers: registers of a thread.
        shared: shared memory of a program, in bytes.
    """
    unit = MULTIPROCESSORS[target]
    of_warp = -(-registers * unit.threads // unit.register_unit) * unit.register_unit
    programs = min(
        unit.programs,
        unit.warps // warps,
        unit.registers // max(of_warp, 1) // warps,
        unit.shared // (shared + unit.reserved) if shared + unit.reserved else unit.programs,
    )
    return programs * warps / unit.warps
