"""The operator's log (`stoker_common.logs`).

A record about an endpoint carries its namespace and name: ``extra=key.reference``.
"""

from __future__ import annotations

from typing import Final

from stoker_common import logs

#: They log every event delivered and every probe answered; we log what becomes of them.
_QUIET: Final = ("kopf.objects", "kopf.activities", "aiohttp.access")


def configure(format: str, level: str) -> None:
    """Sends the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: the name of the lowest level that is written.
    """
    logs.configure(format, level.upper(), quiet=_QUIET)
