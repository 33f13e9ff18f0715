"""Lock between processes on a shared file system.

The kernel releases the lock when the process ends, for whatever reason. On NFS it also works between machines. On a
file system without locks the lock is a no-op, so the guarded code must be correct without it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.5
_REPORT_EVERY_S: Final = 10.0
_TAKEN: Final = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def file_lock(file: Path, on_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `file`, which is created if missing.

    Args:
        on_waiting: called immediately and about every 10 s while another process holds the lock.

    Raises:
        OSError: the file cannot be created, or locking fails for another reason than missing support.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o664)  # closing it releases the lock
    try:
        reported = float("-inf")
        while not _take(handle, file):
            if time.monotonic() - reported >= _REPORT_EVERY_S:
                reported = time.monotonic()
                on_waiting()
            time.sleep(_INTERVAL_S)
        yield
    finally:
        os.close(handle)


def _take(handle: int, file: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "the file system of %s does not support locks (%s): other processes may do the same work", file, error
        )
    return True
