"""Log configuration of the engine's processes (`stoker_common.logs`)."""

from __future__ import annotations

import logging
from typing import Final

from stoker_common import logs

#: Loggers of HTTP clients, which log each request's URL: readers of the log could use the signed URL of a download.
_QUIET: Final = ("httpx", "httpx2")


def configure(format: str, level: int = logging.INFO, **labels: int) -> None:
    """Write the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: lowest level that is written.
        labels: fields in each line that identify the process: its engine and rank, or its front end.
    """
    logs.configure(format, level, labels, quiet=_QUIET)
