"""A file or folder that is there whole or not at all: written under another name, and renamed once it is done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker_common.errors import ArgumentError, StokerError

_MIB = 1 << 20
_partials = set[Path]()  # what is being written


@contextmanager
def new_output(target: Path, size: int) -> Iterator[Path]:
    """The path to write to; at the end it becomes `target`, and is removed where it comes to no end.

    Args:
        size: bytes that will be written.

    Raises:
        ArgumentError: there is something called `target`, or no room for it.
        StokerError: it cannot be written.
    """
    check_new(target)
    try:
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if size > free:
            raise ArgumentError(
                "--output", f"{size // _MIB:,} MiB are needed, but {parent} has {free // _MIB:,} MiB free"
            )
        partial = parent / f".{target.name}.{os.getpid()}.partial"
        _partials.add(partial)
        try:
            yield partial
            partial.rename(target)
        finally:
            _remove(partial)
            _partials.discard(partial)
    except OSError as error:
        raise StokerError(f"cannot write {target}: {error.strerror or error}") from error


def remove_partial() -> None:
    """Removes what has not come to its end, for a process that ends without coming back to `new_output`."""
    for partial in list(_partials):
        _remove(partial)


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def check_new(target: Path) -> None:
    """Raises:
    ArgumentError: there is something called `target`, other than an empty folder that is not called as a file is.
    """
    empty = target.is_dir() and target.suffix != ".gguf" and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not empty):
        raise ArgumentError("--output", f"{target} exists; remove it, or choose another name")
