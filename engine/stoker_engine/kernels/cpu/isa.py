"""Instruction sets for which the kernels are compiled."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    Attributes:
        flags: compiler flags.
        needs: required flags in /proc/cpuinfo, which lists those that both the processor and Linux support.
        tried: whether it was tested on a real processor, not only by an emulator
            (`tests/engine/kernels/test_emulated.py`), which shows that results are correct, but not the speed.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    tried: bool = True


_V3 = frozenset({"avx2", "bmi1", "bmi2", "fma", "f16c", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}

_BF16_FLAGS = ("-mavx512bf16", "-mavx512vnni")

#: ISAs by architecture, the widest first; the last one runs on every processor of the architecture.
_ISAS = {
    "x86_64": (
        Isa("amx", ("-march=x86-64-v4", *_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AMX),
        Isa("avx512-bf16", ("-march=x86-64-v4", *_BF16_FLAGS), _BF16),
        Isa("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
        Isa("avx512", ("-march=x86-64-v4",), _V4),
        Isa("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        Isa("avx2", ("-march=x86-64-v3",), _V3),
        Isa("sse2", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (Isa("neon", ("-march=armv8-a",), frozenset(), tried=False),),
}


def isas() -> tuple[Isa, ...]:
    """Return all ISAs of this architecture, the widest first; empty for unsupported architectures."""
    return _ISAS.get(platform.machine(), ())


def usable_isas() -> tuple[Isa, ...]:
    """Return the ISAs that this processor supports, the widest first."""
    words = _processor_words()
    return tuple(isa for isa in isas() if isa.needs <= words)


def _processor_words() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
