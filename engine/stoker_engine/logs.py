"""Log lines, as text for people or as JSON for machines, on standard error.

What belongs to a request carries its id, wherever it is logged: the id is a context variable of the request's task.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar

#: The id of the HTTP request at work.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: message [request id]``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without a traceback."""
        line = super().formatMessage(record)
        current = request_id.get()
        return line if current is None else f"{line} [{current}]"


class JSONFormatter(logging.Formatter):
    """An object a line: time (Unix seconds), level, logger, message, and what the record carries besides."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        line |= {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(format: str, level: int = logging.INFO) -> None:
    """Sends the log of this process to standard error, as ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for client in ("httpx", "httpx2"):  # a line a request, and a download's URL is signed: who reads it may download
        logging.getLogger(client).setLevel(logging.WARNING)
