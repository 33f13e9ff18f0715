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
    """``TIME LEVEL LOGGER: [engine 1] [rank 0] message [request id]``; which engine and rank it is only where there are
    several.

    Args:
        labels: what each line says of its process.
    """

    def __init__(self, **labels: int) -> None:
        words = "".join(f"[{name} {number}] " for name, number in labels.items())
        super().__init__(f"%(asctime)s %(levelname)s %(name)s: {words}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without a traceback."""
        line = super().formatMessage(record)
        current = request_id.get()
        return line if current is None else f"{line} [{current}]"


class JSONFormatter(logging.Formatter):
    """An object a line: time (Unix seconds), level, logger, message, and what the record carries besides.

    Args:
        labels: what each line says of its process: its engine, its rank.
    """

    def __init__(self, **labels: int) -> None:
        super().__init__()
        self._labels = labels

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._labels,
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        line |= {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(format: str, level: int = logging.INFO, **labels: int) -> None:
    """Sends the log of this process to standard error, as ``text`` or ``json``; each line carries the `labels`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter(**labels) if format == "json" else TextFormatter(**labels))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for client in ("httpx", "httpx2"):  # a line a request, and a download's URL is signed: who reads it may download
        logging.getLogger(client).setLevel(logging.WARNING)
