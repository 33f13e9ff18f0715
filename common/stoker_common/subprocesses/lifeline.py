"""Detection of the end of a parent or child process, even while nothing reads the socket between them."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def parent_for_child() -> int:
    """Return the process id that a child of this thread passes to `die_with`; 0 outside of the main thread.

    The kernel kills the child when the *thread* that started it ends, and other threads may end before the process.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def die_with(parent: int) -> None:
    """Let this process die with its parent process `parent`, on Linux; with 0, do nothing."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def wait_for_hangup(*sockets: int, timeout_s: float | None = None) -> bool:
    """Wait until the peer of one of these socket pairs is closed, for example because its process has ended. Return
    whether this happened before the timeout.

    Reads no data, so other threads can read meanwhile, and does not wake up while both ends are open.
    """
    poll = select.poll()
    for fd in sockets:
        poll.register(fd, 0)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def has_hung_up(sock: int) -> bool:
    """Whether the peer of a socket pair is closed. A peer that has only shut down its writing side does not count as
    closed."""
    return wait_for_hangup(sock, timeout_s=0)


def wait_for_last_words(*sockets: int, timeout_s: float) -> bool:
    """Wait until the peer of one of these connected sockets can send no more, because it is closed or the connection
    has failed. Reads no data. Return whether this happened before the timeout."""
    poll = select.poll()
    for fd in sockets:
        poll.register(fd, getattr(select, "POLLRDHUP", 0))  # on Linux: a TCP peer closed; not triggered by data
    return bool(poll.poll(1000 * timeout_s))
