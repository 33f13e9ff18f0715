"""Compiles the kernels into a library for each ISA.

``python -m stoker_engine.kernels.cpu.build`` builds all ISAs, for images that run on unknown processors; with
``--levels host`` only the widest tested one that this machine's processor supports. A library's name contains a hash of
its sources and flags, so an outdated library is never loaded. Libraries in this machine's cache folder are copied
instead of compiled. ``STOKER_NATIVE_CXXFLAGS`` appends compiler flags, such as those of sanitizers.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.kernels.cpu.isa import Isa, isas, usable_isas

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
#: Folder of prebuilt libraries in images.
PREBUILT = SOURCES.parent / "lib"

#: Fusing a multiplication and an addition is the only optimization that may change results.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")


class BuildError(Exception):
    """The kernels cannot be compiled or loaded; the message has the reason."""


def _flags(isa: Isa) -> tuple[str, ...]:
    return (*_FLAGS, *isa.flags, *shlex.split(os.environ.get("STOKER_NATIVE_CXXFLAGS", "")))


def _sources() -> list[Path]:
    found = sorted(SOURCES.rglob("*.cpp"))
    if not found:
        raise BuildError(f"{SOURCES} contains no C++ sources")
    return found


@functools.cache
def file_name(isa: Isa) -> str:
    """Return the library's file name, without its folder."""
    digest = hashlib.sha256(" ".join(_flags(isa)).encode())
    for file in sorted((*_sources(), *SOURCES.rglob("*.h"))):
        digest.update(file.read_bytes())
    return f"stoker-{isa.name}-{digest.hexdigest()[:16]}.so"


def build(isa: Isa, folder: Path) -> Path:
    """Compile the library for `isa` into `folder`, or copy it from the cache folder; an existing library is kept.
    Several processes may call this concurrently.

    Raises:
        BuildError: the compiler is missing or failed, or the folder cannot be written.
    """
    target = folder / file_name(isa)
    if target.is_file():
        return target
    compiled = cache_folder() / "native" / target.name
    compiler = None if compiled.is_file() else _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file():
                return target
            if compiler is None:
                logger.info("copying CPU kernels (%s) into %s", isa.name, folder)
                _copy(compiled, target)
            else:
                logger.info("compiling CPU kernels (%s) into %s", isa.name, folder)
                _compile(compiler, isa, target)
    except OSError as error:
        raise BuildError(f"cannot write {folder}: {error.strerror}") from error
    return target


def _compiler() -> str:
    requested = os.environ.get("CXX")
    found = shutil.which(requested) if requested else shutil.which("g++") or shutil.which("c++")
    if found is None:
        remedy = f"install {requested}, or unset CXX" if requested else "install g++"
        raise BuildError(f"there is no C++ compiler {requested or 'g++'}; {remedy}")
    return found


def _copy(compiled: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        copied = Path(name) / target.name
        shutil.copy2(compiled, copied)
        copied.rename(target)  # atomic


def _compile(compiler: str, isa: Isa, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        flags = _flags(isa)
        sources = _sources()
        objects = [folder / f"{source.parent.name}-{source.stem}.o" for source in sources]
        commands = [
            (compiler, *flags, f"-I{SOURCES}", "-c", "-o", str(o), str(c))
            for o, c in zip(objects, sources, strict=True)
        ]
        for number, _ in enumerate(pool.map(_run, commands), 1):
            if number % 10 == 0:
                logger.info("compiling CPU kernels (%s): %d of %d files", isa.name, number, len(commands))
        made = folder / target.name
        _run((compiler, *flags, "-shared", "-o", str(made), *map(str, objects)))
        made.rename(target)  # atomic


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stdout.strip()[-2000:]}")


def main() -> None:
    """Build libraries into a folder; without ``--cache``, remove all others from it."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for this processor architecture.")
    parser.add_argument("folder", type=Path, nargs="?", default=PREBUILT, help="default: where the engine looks first")
    parser.add_argument(
        "--cache", action="store_true", help="build into the cache folder instead, where the engine looks next"
    )
    parser.add_argument(
        "--levels",
        choices=("all", "host"),
        default="all",
        help="host: only the widest instruction set that this processor supports",
    )
    options = parser.parse_args()
    folder: Path = cache_folder() / "native" if options.cache else options.folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    selected = isas()
    if options.levels == "host":
        selected = tuple(isa for isa in usable_isas() if isa.tried)[:1]
    try:
        made = {build(isa, folder) for isa in selected}
    except BuildError as error:
        sys.exit(f"the CPU kernels were not built: {error}")
    if options.cache:
        return  # other checkouts may use the same cache folder
    for stale in set(folder.glob("stoker-*.so")) - made:
        stale.unlink()


if __name__ == "__main__":
    main()
