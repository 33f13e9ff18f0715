"""The log of the engine's processes (`stoker_common.logs`)."""

from __future__ import annotations

import logging
from typing import Final

from stoker_common import logs

#: HTTP clients log a line for each request. The URL of a download is signed, so a reader of the log could use it.
_QUIET: Final = ("httpx", "httpx2")


def configure(format: str, level: int = logging.INFO, **labels: int) -> None:
    """Sends the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: the lowest that is written.
        labels: fields of each line that say which process wrote it: its engine, its rank.
    """
    logs.configure(format, level, labels, quiet=_QUIET)
