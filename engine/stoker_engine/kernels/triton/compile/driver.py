"""The C module by which Triton talks to NVIDIA's driver, compiled where there is no GPU.

Triton compiles it when it first launches a kernel, which takes a C compiler and Python's headers; an image has neither.
So they are needed once, when kernels are built for it (`stoker build-kernels`). AMD's module has the place of ROCm's
libraries in its source; there a pod needs a compiler.
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
    """Whether there is a C compiler, and Python's headers."""
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    return has_headers and any(map(shutil.which, _COMPILERS))


def build_driver(folder: Path) -> None:
    """Compiles the module into `folder`.

    Raises:
        subprocess.CalledProcessError: the compiler fails.
    """
    source = _VENDOR / "driver.c"
    target = folder / _name(source)
    if target.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    compiler = next(filter(None, map(shutil.which, _COMPILERS)))
    includes = [f"-I{_VENDOR / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    with tempfile.TemporaryDirectory() as scratch:
        # An empty library of the driver's name: the node's own is found when the module is loaded.
        empty = [compiler, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{_LIBRARY}", "-o", f"{scratch}/{_LIBRARY}"]
        subprocess.run(empty, check=True)
        linked = [f"-L{scratch}", "-Wl,--no-as-needed", f"-l:{_LIBRARY}"]
        made = f"{scratch}/made.so"
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.run([compiler, str(source), *flags, *includes, *linked, "-o", made], check=True)
        shutil.copyfile(made, target)


def use_built_driver(folder: Path) -> None:
    """Has Triton take the module from `folder` where it would compile it; what is not there it compiles."""

    def built(name: str, src: str, srcdir: str, *options: Any) -> str:
        found = folder / _name(Path(src))
        if found.is_file():
            return str(found)
        with knobs.build.scope():
            knobs.build.impl = None
            return str(build._build(name, src, srcdir, *options, []))

    knobs.build.impl = built


def _name(source: Path) -> str:
    """Of the module made of this source, for this Python."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return f"driver-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


if __name__ == "__main__":
    build_driver(Path(sys.argv[1]))
