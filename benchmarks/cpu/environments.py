"""Cached parts of the benchmark: engines, their Python environments, converted models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

#: benchmarks/, on the Python path of every process of the benchmark.
BENCHMARKS = Path(__file__).parents[1]


class CannotRunError(Exception):
    """An engine cannot be installed or does not work; the message is the cause. The benchmark continues without it."""


class Step(Protocol):
    """Runs a command; prints its description and duration. Its output goes to a log file."""

    def __call__(self, description: str, command: Sequence[str], cwd: Path | None = None) -> None:
        """Run the command. Raises `CannotRunError` if it fails."""


def cache_folder() -> Path:
    """Return ``$STOKER_BENCH_CACHE``, or else ``~/.cache/stoker-bench``."""
    return Path(os.environ.get("STOKER_BENCH_CACHE") or Path.home() / ".cache" / "stoker-bench").absolute()


def once(folder: Path, recipe: str, make: Callable[[Path, Step], None]) -> Path:
    """Return `folder`, filled by `make` unless that was already done with the same `recipe`.

    Args:
        recipe: text that changes whenever the result would.

    Raises:
        CannotRunError: a step failed; only its log remains, next to the folder.
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
    """Return the interpreter of a virtual environment."""
    return str(environment / "bin" / "python")


def pip(environment: Path) -> list[str]:
    """Return the command of `pip install` for an environment."""
    return [python_of(environment), "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]


def borrow_packages(environment: Path) -> None:
    """Add this process's packages to an environment, after its own: torch alone has gigabytes."""
    [site_packages] = environment.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def program(name: str) -> str:
    """Return the path of an installed program.

    Raises:
        CannotRunError: it is not installed.
    """
    if found := shutil.which(name):
        return found
    raise CannotRunError(f"{name} is not installed")


def last_lines(log: Path, count: int = 3) -> str:
    """Return the end of a log in one line, which usually contains the cause of a failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-600:]


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with benchmarks/ on the Python path, and without access to model hubs."""
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(more or {})}


def steps_into(log: Path) -> Step:
    """Return a `Step` that writes output to this log file, which is truncated."""
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
                f"{description} failed, exit code {done.returncode}: {last_lines(log)} (full log: {log})"
            )

    return step
