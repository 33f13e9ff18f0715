"""Restrict an installed engine to an instruction set that is narrower than the processor's.

    python -m cpu.restrict LIBRARY...

OpenVINO and torch choose their code by the CPUID instruction. In their libraries it is replaced by two bytes that are
invalid in 64-bit mode; a preloaded library (`cpuid.c`) handles the signal and answers without the features that the
instruction set excludes.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from cpu.environments import CannotRunError, Step, program

#: Instruction sets to which engines can be restricted (`kernels/cpu/isa.py`).
RESTRICTIONS: Final = ("avx2", "avx2-vnni", "avx512", "avx512-vnni")

_EAX, _EBX, _ECX, _EDX = range(4)
#: Subleaf of CPUID's leaf 7, register and bit of AVX-512, AMX and later vector features, by the names that Linux has or
#: would have. From Intel's Software Developer's Manual, volume 2A, "CPUID".
FEATURES: Final = {
    "avx512f": (0, _EBX, 16), "avx512dq": (0, _EBX, 17), "avx512ifma": (0, _EBX, 21), "avx512cd": (0, _EBX, 28),
    "avx512bw": (0, _EBX, 30), "avx512vl": (0, _EBX, 31), "avx512vbmi": (0, _ECX, 1), "avx512_vbmi2": (0, _ECX, 6),
    "avx512_vnni": (0, _ECX, 11), "avx512_bitalg": (0, _ECX, 12), "avx512_vpopcntdq": (0, _ECX, 14),
    "avx512_vp2intersect": (0, _EDX, 8), "avx512_fp16": (0, _EDX, 23), "amx_bf16": (0, _EDX, 22),
    "amx_tile": (0, _EDX, 24), "amx_int8": (0, _EDX, 25), "avx_vnni": (1, _EAX, 4), "avx512_bf16": (1, _EAX, 5),
    "amx_fp16": (1, _EAX, 21), "avx_ifma": (1, _EAX, 23), "avx_vnni_int8": (1, _EDX, 4),
    "avx_ne_convert": (1, _EDX, 5), "amx_complex": (1, _EDX, 8), "avx_vnni_int16": (1, _EDX, 10),
    "avx10": (1, _EDX, 19),
}  # fmt: skip
_CPUID = b"\x0f\xa2"
#: Twice PUSH ES, which is invalid in 64-bit mode, so that compilers never emit it, unlike UD2.
_PATCH = b"\x06\x06"
_ANSWERS = Path(__file__).with_name("cpuid.c")
_PRELOADED = "cpuid.so"


def restriction() -> str | None:
    """Return the instruction set that ``STOKER_NATIVE_KERNELS`` selects for all engines; None if it selects none.

    Raises:
        CannotRunError: other engines cannot be restricted to it.
    """
    from stoker_engine.kernels.cpu.isa import usable_isas  # not in engines' environments, which import this file

    isa = os.environ.get("STOKER_NATIVE_KERNELS") or "1"
    if isa in ("0", "1") or platform.machine() != "x86_64":
        return None
    if isa not in RESTRICTIONS or isa not in {each.name for each in usable_isas()}:
        raise CannotRunError(f"it cannot be restricted to STOKER_NATIVE_KERNELS={isa} on this processor")
    return isa


def recipe(libraries: tuple[str, ...]) -> str:
    """Return what a restricted environment depends on besides its packages, for `once`; empty without a restriction."""
    isa = restriction()
    return "" if isa is None else f", restricted: {cleared(isa)} {_PATCH!r} {libraries} {_ANSWERS.read_text()}"


def folder_name(engine: str) -> str:
    """Return the name of an engine's folder in the cache, which contains the instruction set if there is one."""
    isa = restriction()
    return engine if isa is None else f"{engine}-{isa}"


def restrict(environment: Path, libraries: tuple[str, ...], step: Step) -> None:
    """Restrict an engine's environment if ``STOKER_NATIVE_KERNELS`` selects an instruction set.

    Args:
        environment: folder of a virtual environment, which is changed.
        libraries: patterns of paths in its site-packages.

    Raises:
        CannotRunError: a library cannot be patched.
    """
    isa = restriction()
    if isa is None:
        return
    compiler = program("cc")
    for tool in ("objdump", "readelf"):
        program(tool)
    masks = ", ".join("{" + ", ".join(f"{mask:#x}u" for mask in masks) + "}" for masks in cleared(isa))
    command = [compiler, "-O2", "-shared", "-fPIC", f"-DCLEAR={{{masks}}}", f"-DPATCH={_PATCH[0]}", str(_ANSWERS)]
    step("its CPUID", [*command, "-o", str(environment / _PRELOADED)])
    [site_packages] = environment.glob("lib/python*/site-packages")
    files: list[str] = []
    for pattern in libraries:
        found = sorted(map(str, site_packages.glob(pattern)))
        if not found:
            raise CannotRunError(f"no library matches {pattern}")
        files += found
    step(f"its libraries, restricted to {isa}", [sys.executable, "-m", "cpu.restrict", *files])


def variables(environment: Path) -> dict[str, str]:
    """Return the variables with which the programs of a restricted environment are started; empty for others."""
    preloaded = environment / _PRELOADED
    return {"LD_PRELOAD": str(preloaded)} if preloaded.is_file() else {}


def cleared(isa: str) -> list[list[int]]:
    """Return the bits that an instruction set excludes: EAX to EDX of leaf 7, subleaves 0 and 1."""
    from stoker_engine.kernels.cpu.isa import isas

    [needs] = [each.needs for each in isas() if each.name == isa]
    masks = [[0] * 4, [0] * 4]
    for feature, (subleaf, register, bit) in FEATURES.items():
        if feature not in needs:
            masks[subleaf][register] |= 1 << bit
    return masks


def patch(library: Path) -> int:
    """Replace CPUID instructions of an x86-64 ELF file, in place. Return their number.

    Raises:
        ValueError: the disassembler's address is not that of a CPUID instruction in the file.
    """
    text = library.read_bytes()
    if _CPUID not in text:
        return 0
    data = bytearray(text)
    sections = _code_sections(library)
    addresses = _cpuid_addresses(library)
    for address in addresses:
        [position] = [
            address - start + offset for start, offset, size in sections if start <= address < start + size
        ] or [-1]
        if position < 0 or data[position : position + 2] != _CPUID:
            raise ValueError(f"{library}: no CPUID at {address:#x}")
        data[position : position + 2] = _PATCH
    if addresses:
        library.unlink()  # another environment may have the same file by a hard link
        library.write_bytes(data)
    return len(addresses)


def _code_sections(library: Path) -> list[tuple[int, int, int]]:
    """Return address, position in the file and size of each section with code."""
    printed = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"PROGBITS +([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+) [0-9a-f]+ +AX", printed)
    return [(int(start, 16), int(offset, 16), int(size, 16)) for start, offset, size in found]


def _cpuid_addresses(library: Path) -> list[int]:
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as disassembler:
        assert disassembler.stdout is not None
        found = [int(line.split(b":")[0], 16) for line in disassembler.stdout if line.rstrip().endswith(b"\tcpuid")]
    if disassembler.returncode:
        raise ValueError(f"{library}: objdump ended with {disassembler.returncode}")
    return found


def main(files: list[str]) -> None:
    """Patch files; print the number of instructions in each."""
    total = 0
    for file in files:
        count = patch(Path(file))
        total += count
        print(f"{file}: {count} CPUID instructions")
    if not total:
        sys.exit("no CPUID instruction was found")


if __name__ == "__main__":
    main(sys.argv[1:])
