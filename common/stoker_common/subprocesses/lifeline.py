"""A child process ends when its parent does, and its parent learns of its end, also while neither reads its pipe."""

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
    """The process id that a child started by this thread passes to `die_with`; 0: none.

    The kernel takes the death of the thread that starts a process for the death of its parent, so only the main thread
    gives one.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def die_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` ends; 0 changes nothing."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def wait_for_hangup(*sockets: int, timeout_s: float | None = None) -> bool:
    """Waits until the other end of one of these socket pairs is closed, which the end of its process does too; whether
    that was in time.

    It reads nothing, so others may, and wakes nobody while both ends live.
    """
    poll = select.poll()
    for fd in sockets:
        poll.register(fd, 0)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def has_hung_up(sock: int) -> bool:
    """Whether the other end of a socket pair is closed; one that only sends no more has not hung up."""
    return wait_for_hangup(sock, timeout_s=0)


def wait_for_last_words(*sockets: int, timeout_s: float) -> bool:
    """Waits until the other end of one of these connected sockets sends no more: it is closed, its process has ended,
    or, of one on another machine, it cannot be reached. Reads nothing. Whether that came in time."""
    poll = select.poll()
    for fd in sockets:
        poll.register(fd, getattr(select, "POLLRDHUP", 0))  # Linux: TCP says no more of the other end's close
    return bool(poll.poll(1000 * timeout_s))
