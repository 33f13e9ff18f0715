"""What is made once and kept in the bench's cache folder: engines, their Python environments, converted models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

#: benchmarks/, from which every process of the bench imports.
BENCHMARKS = Path(__file__).parents[1]


class CannotRunError(Exception):
    """An engine cannot be had or does not work here; the message is the cause. The bench goes on without it."""


class Step(Protocol):
    """Runs a command, telling the user what for and how long it took. Its output goes to a log file."""

    def __call__(self, description: str, command: Sequence[str], cwd: Path | None = None) -> None:
        """Raises `CannotRunError` where it fails."""


def cache_folder() -> Path:
    """``$STOKER_BENCH_CACHE``, else ``~/.cache/stoker-bench``."""
    return Path(os.environ.get("STOKER_BENCH_CACHE") or Path.home() / ".cache" / "stoker-bench").absolute()


def once(folder: Path, recipe: str, make: Callable[[Path, Step], None]) -> Path:
    """`folder`, made by `make` unless it was by the same `recipe`: a text that changes when the result would.

    Raises:
        CannotRunError: a step failed; nothing is kept but its log, beside the folder.
    """
    ready = folder / ".ready"
    if ready.is_file() and ready.read_text() == recipe:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.with_name(f"{folder.name}.log")
    try:
        make(folder, steps_into(log))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ready.write_text(recipe)
    return folder


def python_of(environment: Path) -> str:
    """The interpreter of a virtual environment."""
    return str(environment / "bin" / "python")


def pip(environment: Path) -> list[str]:
    """How pip is called for an environment."""
    return [python_of(environment), "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]


def borrow_packages(environment: Path) -> None:
    """Lets an environment see the packages of the one that runs this, after its own: torch alone is gigabytes."""
    [site_packages] = environment.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def program(name: str) -> str:
    """The path of a program that has to be installed already.

    Raises:
        CannotRunError: it is not.
    """
    if found := shutil.which(name):
        return found
    raise CannotRunError(f"{name} is not installed")


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log, in one line: mostly the cause of a failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-600:]


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with benchmarks/ on Python's path, and nothing fetched from model hubs."""
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(more or {})}


def steps_into(log: Path) -> Step:
    """Steps whose output goes to one log file, made again."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")

    def step(description: str, command: Sequence[str], cwd: Path | None = None) -> None:
        print(f"  {description} …", end="", flush=True)
        started = time.perf_counter()
        with log.open("a") as output:
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            done = subprocess.run(
                command, cwd=cwd, env=environ(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        print(f" {time.perf_counter() - started:.0f} s", flush=True)
        if done.returncode:
            raise CannotRunError(
                f"{description} failed, exit code {done.returncode}: {last_lines(log)} (all of it: {log})"
            )

    return step
