"""Processes that tests start, or that what they test starts."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this id, is there and is no zombie."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
