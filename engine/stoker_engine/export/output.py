"""Atomic output of a file or folder: it is written under a temporary name, and renamed when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker_common.errors import ArgumentError, StokerError

_MIB = 1 << 20
_partials = set[Path]()  # temporary paths in use


@contextmanager
def new_output(target: Path, size: int) -> Iterator[Path]:
    """Yield a temporary path to write to. It is renamed to `target` on success, and removed on failure.

    Args:
        size: number of bytes that will be written.

    Raises:
        ArgumentError: see `check_new`; or the disk has less than `size` bytes free.
        StokerError: writing failed.
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
    """Remove incomplete outputs, for a process that exits without returning to `new_output`."""
    for partial in list(_partials):
        _remove(partial)


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def check_new(target: Path) -> None:
    """Check that `target` does not exist, or is an empty folder whose name does not end with ``.gguf``.

    Raises:
        ArgumentError: `target` is a file, a symbolic link, or another folder.
    """
    empty = target.is_dir() and target.suffix != ".gguf" and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not empty):
        raise ArgumentError("--output", f"{target} exists; remove it, or choose another name")
