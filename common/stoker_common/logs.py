"""Logging of all programs to standard error, as text or as JSON.

Both formats have the fields `timestamp` (RFC 3339, UTC, milliseconds), `level` in lower case, `logger`, `message`;
`request_id` if the record concerns a request; and the process's labels (`engine`, `rank`, `front_end`). JSON also has
the extra fields (``extra=``) of Stoker's own records, and text some of these. A message is always one line: control
characters are escaped, because clients choose parts of it.

Envoy's own lines have the first four fields (`stoker_gateway.envoy.log_format`).
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

#: The id of the HTTP request that the current task handles; `None` outside a request.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

#: Prefix of Stoker's loggers. Extra fields of other packages' records are not logged.
_OUR_LOGGERS: Final = "stoker_"
_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
#: Extra fields that text lines show, besides `request_id`. Others are shown only in JSON.
_SHOWN_IN_TEXT: Final = ("namespace", "endpoint")
#: Characters that end a line, control a terminal or change the text direction, and lone surrogates.
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class _LabelledFormatter(logging.Formatter):
    """Base class of formatters that add the labels of the process to each line.

    Args:
        labels: fields of each line of this process.
    """

    def __init__(self, labels: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._labels = dict(labels or {})


class TextFormatter(_LabelledFormatter):
    """Formats ``TIMESTAMP LEVEL LOGGER: message [engine=1 rank=0 request_id=r-1]``, without empty brackets.

    A traceback follows in separate, indented lines: a line without a timestamp belongs to the previous one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of the traceback."""
        extras = _extras(record)
        named = {name: extras[name] for name in _SHOWN_IN_TEXT if name in extras}
        labels = " ".join(f"{name}={value}" for name, value in (self._labels | named | _request(extras)).items())
        head = f"{rfc3339(record.created)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        lines = [f"{head} [{labels}]" if labels else head]
        if record.exc_info:
            lines += [f"  {line}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(_UNSAFE.sub(_escaped, line) for line in lines)


class JSONFormatter(_LabelledFormatter):
    """One JSON object per line, in ASCII, so that it is valid in any encoding of standard error.

    Its fields are `timestamp`, `level`, `logger`, `message`, `request_id`, the labels, the record's extra fields, and
    `exception`, a traceback. Extra fields do not replace other fields. Lone surrogates, which many parsers reject,
    become U+FFFD.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        extras = _extras(record)
        line = {
            "timestamp": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_request(extras),
            **self._labels,
        }
        line |= {name: _scalar(value) for name, value in extras.items() if name not in {*line, "request_id"}}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _NOT_ASCII.sub(_json_escaped, json.dumps(line, ensure_ascii=False))


def configure(
    format: str,
    level: int | str = logging.INFO,
    labels: Mapping[str, object] | None = None,
    quiet: Collection[str] = (),
) -> None:
    """Write the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: lowest level that is written, as a number or a name in upper case.
        labels: fields of each line of this process.
        quiet: names of loggers whose records below the level WARNING are not written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter(labels) if format == "json" else TextFormatter(labels))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)


def report_exit(package: str, program: str, reason: object, hint: str = "") -> None:
    """Report on standard error why a program exits: as a log line if the log is JSON, otherwise as plain text.

    Args:
        package: name of the logger, such as ``stoker_gateway``.
        program: the command, such as ``stoker gateway``.
        hint: a further line for users, omitted in JSON.
    """
    handlers = logging.getLogger().handlers
    if any(isinstance(handler.formatter, JSONFormatter) for handler in handlers):
        logging.getLogger(package).error("%s: %s", program, reason)
    else:
        print(f"{program}: {reason}", *filter(None, [hint]), sep="\n", file=sys.stderr)  # noqa: T201


def rfc3339(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the format ``2026-11-23T08:51:07.512Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """Return the extra fields of a record; none if it is not from Stoker's loggers."""
    if not record.name.startswith(_OUR_LOGGERS):
        return {}
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}


def _request(extras: Mapping[str, object]) -> dict[str, object]:
    """Return `request_id`: the record's own, or that of the current task; empty if there is neither."""
    current = extras.get("request_id") or request_id.get()
    return {} if current is None else {"request_id": current}


def _scalar(value: object) -> object:
    """Return the value if it is a JSON scalar (unlike NaN and infinity), otherwise its text."""
    is_plain = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    return "\\ufffd" if _SURROGATE.match(match[0]) else json.dumps(match[0])[1:-1]
