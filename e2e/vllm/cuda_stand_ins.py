"""Builds stand-ins for the CUDA libraries that a torch package is linked against, for machines without a GPU.

    python cuda_stand_ins.py TORCH FOLDER     torch's package, and the folder for the stand-ins

The default torch wheel is built for CUDA and requires 3 GB of NVIDIA's libraries. On a CPU it calls none of them, but
the dynamic loader needs every named library in the named versions. A stand-in defines exactly the required symbols, and
each of its functions returns 100, CUDA's code for "no device". The program needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_NVIDIA = re.compile(r"lib(cu\w+|nv\w+|nccl)\.so\.\d+")
_THEIRS = re.compile(r"(cu|nv|nccl)[A-Za-z]\w+")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]")
_VERSION = re.compile(r"Name: (\S+)  Flags|Version: 1  File: (\S+)")
_UNDEFINED = re.compile(r"(?:FUNC|NOTYPE|OBJECT) +GLOBAL +DEFAULT +UND ([^@\s]+)(?:@(\S+))?")


def stand_ins(torch: Path) -> dict[str, dict[str, set[str]]]:
    """Return the required symbols of each NVIDIA library, by version ("" for symbols without)."""
    symbols: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    libraries = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    for library in libraries:
        needed = [name for name in _NEEDED.findall(_readelf("-d", library)) if _NVIDIA.fullmatch(name)]
        of_version = {version: name for name, version in _versions(library) if name in needed}
        for name in needed:
            symbols[name].update({version: symbols[name][version] for version, of in of_version.items() if of == name})
        for symbol, version in _UNDEFINED.findall(_readelf("--dyn-syms", library)):
            if version in of_version:
                symbols[of_version[version]][version].add(symbol)
            elif needed and not version and _THEIRS.fullmatch(symbol):
                symbols[needed[0]][""].add(symbol)
    return symbols


def _versions(library: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and version of each versioned library that a library requires."""
    of = ""
    for version, name in _VERSION.findall(_readelf("-V", library)):
        if name:
            of = name
        else:
            yield of, version


def _readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", option, library], check=True, stdout=subprocess.PIPE, text=True).stdout


def build(folder: Path, name: str, versions: dict[str, set[str]]) -> None:
    """Compile one stand-in."""
    symbols = sorted(set().union(*versions.values()))
    code = [".text", *(f".globl {each}\n.type {each}, @function\n{each}:" for each in symbols), "mov $100, %eax", "ret"]
    script = [f"{version} {{ {' '.join(f'{each};' for each in sorted(of))} }};" for version, of in versions.items()]
    with tempfile.TemporaryDirectory() as scratch:
        source, map_ = Path(scratch, "stand_in.s"), Path(scratch, "versions.map")
        source.write_text("\n".join([*code, '.section .note.GNU-stack,"",@progbits', ""]))
        map_.write_text("\n".join(line for line in script if not line.startswith(" ")))
        linker_options = [f"-Wl,--version-script={map_}"] if map_.stat().st_size else []
        subprocess.run(
            ["gcc", "-shared", "-nostdlib", f"-Wl,-soname={name}", *linker_options, "-o", folder / name, source],
            check=True,
        )


if __name__ == "__main__":
    for library_name, symbols in stand_ins(Path(sys.argv[1])).items():
        build(Path(sys.argv[2]), library_name, symbols)
