"""The operator's log (`stoker_common.logs`).

A record about an endpoint has its namespace and name: ``extra=key.reference``.
"""

from __future__ import annotations

from typing import Final

from stoker_common import logs

#: Loggers of every watch event and every probe; only their warnings and errors are written.
_QUIET: Final = ("kopf.objects", "kopf.activities", "aiohttp.access")


def configure(format: str, level: str) -> None:
    """Write the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: name of the lowest level to write.
    """
    logs.configure(format, level.upper(), quiet=_QUIET)
