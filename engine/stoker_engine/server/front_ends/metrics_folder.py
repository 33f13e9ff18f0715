"""The folder of the front ends' HTTP metrics, which prometheus_client keeps in files.

The supervisor removes its folder when it ends. If it was killed, the next supervisor removes it: a folder that no
process has locked belongs to none. The kernel releases the lock when its owner ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stoker_common.errors import StokerError

logger = logging.getLogger(__name__)

_PREFIX: Final = "stoker-metrics-"


@contextlib.contextmanager
def metrics_folder() -> Iterator[Path]:
    """Create a folder, and remove it at the end of the context. Folders of this user's servers that were killed are
    removed, too.

    Raises:
        StokerError: no folder can be created.
    """
    try:
        _remove_abandoned()
        folder, lock = _create()
    except OSError as error:
        raise StokerError(
            f"cannot create a folder for metrics: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _create() -> tuple[Path, int]:
    """Create a folder; return it and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another server took the folder for abandoned
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink and folder.exists():
            return folder, lock
        os.close(lock)


def _remove_abandoned() -> None:
    """Remove the folders that no living process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is locked, is no folder, or belongs to another user
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    logger.info("removing %s, which a server that was killed has left", folder)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
