"""Compiles the kernels: one small library a level, in seconds.

``python -m stoker_engine.kernels.native.build`` builds all levels, for an image that will run on processors not known
yet. A library's name carries a hash of what it was made from: one that is out of date is never loaded.
``STOKER_NATIVE_CXXFLAGS`` adds flags for the compiler, after ours: sanitizers, for example.
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

from stoker_engine.kernels.native.levels import Level, levels

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
#: Where images have the libraries.
PREBUILT = SOURCES / "lib"

#: A multiplication and an addition may become one instruction; nothing else that changes results is allowed.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-pthread", "-fPIC", "-w")


class BuildError(Exception):
    """The kernels cannot be compiled; says why."""


def _flags(level: Level) -> tuple[str, ...]:
    return (*_FLAGS, *level.flags, *shlex.split(os.environ.get("STOKER_NATIVE_CXXFLAGS", "")))


@functools.cache
def file_name(level: Level) -> str:
    """The library's name, without its folder."""
    digest = hashlib.sha256(" ".join(_flags(level)).encode())
    for file in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(file.read_bytes())
    return f"stoker-{level.name}-{digest.hexdigest()[:16]}.so"


def build(level: Level, folder: Path) -> Path:
    """Compiles the library of `level` into `folder`, unless it is there. Safe to call from several processes.

    Raises:
        BuildError: no compiler, one that is too old, or a folder that cannot be written.
    """
    target = folder / file_name(level)
    if target.is_file():
        return target
    compiler = _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                logger.info("compiling CPU kernels (%s) into %s", level.name, folder)
                _compile(compiler, level, target)
    except OSError as error:
        raise BuildError(f"cannot write {folder}: {error.strerror}") from error
    return target


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise BuildError(f"there is no C++ compiler ({wanted or 'g++'})")
    return found


def _compile(compiler: str, level: Level, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        flags = _flags(level)
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [folder / f"{source.stem}.o" for source in sources]
        commands = [(compiler, *flags, "-c", "-o", str(o), str(c)) for o, c in zip(objects, sources, strict=True)]
        list(pool.map(_run, commands))
        made = folder / target.name
        _run((compiler, *flags, "-shared", "-o", str(made), *map(str, objects)))
        made.rename(target)  # whole, or not there


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stdout.strip()[-2000:]}")


def main() -> None:
    """Builds all levels into the folder that is given."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for every level of this kind of processor.")
    parser.add_argument("folder", type=Path, nargs="?", default=PREBUILT, help="default: where the engine looks first")
    folder: Path = parser.parse_args().folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        made = {build(level, folder) for level in levels()}
    except BuildError as error:
        sys.exit(f"the CPU kernels were not built: {error}")
    for stale in set(folder.glob("stoker-*.so")) - made:
        stale.unlink()


if __name__ == "__main__":
    main()
