"""Compiles in advance, without a GPU, the C module through which Triton calls NVIDIA's driver.

Otherwise Triton compiles it at the first kernel launch, which needs a C compiler and Python's headers; images have
neither. `stoker build-kernels` calls this. AMD's module is not prebuilt, since its source contains the path of ROCm's
libraries; pods on AMD GPUs need a compiler.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

import triton
from triton import knobs
from triton.runtime import build

_VENDOR: Final = Path(triton.__file__).parent / "backends" / "nvidia"
_LIBRARY: Final = "libcuda.so.1"
_COMPILERS: Final = ("gcc", "clang", "cc")


def can_build_driver() -> bool:
    """Whether a C compiler and Python's headers are installed."""
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    return has_headers and any(map(shutil.which, _COMPILERS))


def build_driver(folder: Path) -> None:
    """Compile the module into `folder`, unless it is there.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    source = _VENDOR / "driver.c"
    target = folder / _name(source)
    if target.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    compiler = next(filter(None, map(shutil.which, _COMPILERS)))
    includes = [f"-I{_VENDOR / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    with tempfile.TemporaryDirectory() as scratch:
        # Link against an empty library with the driver's name; the node's library is used when the module is loaded.
        empty = [compiler, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{_LIBRARY}", "-o", f"{scratch}/{_LIBRARY}"]
        subprocess.run(empty, check=True)
        linked = [f"-L{scratch}", "-Wl,--no-as-needed", f"-l:{_LIBRARY}"]
        made = f"{scratch}/made.so"
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.run([compiler, str(source), *flags, *includes, *linked, "-o", made], check=True)
        shutil.copyfile(made, target)


def use_built_driver(folder: Path) -> None:
    """Make Triton use modules in `folder`, and compile only missing ones."""

    def built(name: str, src: str, srcdir: str, *options: Any) -> str:
        found = folder / _name(Path(src))
        if found.is_file():
            return str(found)
        with knobs.build.scope():
            knobs.build.impl = None
            return str(build._build(name, src, srcdir, *options, []))

    knobs.build.impl = built


def _name(source: Path) -> str:
    """Return the file name of the module compiled from `source` for this Python version."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return f"driver-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


if __name__ == "__main__":
    build_driver(Path(sys.argv[1]))
