"""Log lines, as text for people or as JSON for machines, on standard error.

Which endpoint a record is about, it carries: ``extra={"namespace": ..., "endpoint": ...}``.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

_REFERENCE = ("namespace", "endpoint")


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: NAMESPACE/ENDPOINT: message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s", defaults={"about": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without a traceback."""
        reference = _reference(record)
        about = "/".join(reference.values()) + ": " if reference else ""
        return self._style.format(logging.makeLogRecord({**vars(record), "about": about}))


class JSONFormatter(logging.Formatter):
    """An object a line: ts (RFC 3339, UTC), level, logger, message; namespace and endpoint of what it is about; and
    exception, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_reference(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(format: LogFormat, level: str) -> None:
    """Sends the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # They log every event delivered and every probe answered; we log what becomes of them.
    for chatter in ("kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(chatter).setLevel(logging.WARNING)


def _reference(record: logging.LogRecord) -> dict[str, str]:
    """Namespace and name of the endpoint that the record is about; empty where it is about none."""
    found = {field: str(getattr(record, field, "") or "") for field in _REFERENCE}
    return found if all(found.values()) else {}
