"""Helpers for processes that tests or the tested code start."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Return whether a process, or the process with this id, exists and is not a zombie."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Return a process's arguments. There are none if it has ended, as a child between two looks may have."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also for a zombie
        return []
