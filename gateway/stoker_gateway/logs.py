"""Log lines, as text for people or as JSON for machines, on standard error. Envoy's own are beside them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

LogFormat = Literal["text", "json"]

#: What `JSONFormatter` writes, in Envoy's words.
ENVOY_JSON: Final = {"ts": "%Y-%m-%dT%T.%e%z", "level": "%l", "logger": "envoy.%n", "message": "%j"}


class JSONFormatter(logging.Formatter):
    """An object a line: ts (RFC 3339, UTC), level, logger, message; and exception, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(format: LogFormat) -> None:
    """Sends the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
