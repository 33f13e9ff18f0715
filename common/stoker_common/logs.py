"""The log lines of all programs, as text for people or as JSON for machines, on standard error.

Both forms have the same fields: `timestamp` (RFC 3339, UTC, milliseconds), `level` in lower case, `logger`, `message`;
`request_id` where a request is concerned; the process's labels (`engine`, `rank`); and what our own records carry
besides (``extra=``). A line is one line whatever is logged: control characters are escaped, since clients choose parts
of it.

Envoy writes its own lines with the same fields (`stoker_gateway.envoy.log_format`).
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

#: The id of the HTTP request that the current task works on; `None` outside a request.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

#: Our programs' loggers. Other packages' records carry objects of their own in ``extra=``, which are not logged.
_OUR_LOGGERS: Final = "stoker_"
_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
#: Of what a record carries, what text lines show too. The message has the rest in words.
_SHOWN_IN_TEXT: Final = ("namespace", "endpoint")
#: Characters that end a line, control a terminal or reverse the direction of text; and halves of surrogate pairs.
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class _LabelledFormatter(logging.Formatter):
    """Writes the labels of its process in each line.

    Args:
        labels: fields that each line of this process has.
    """

    def __init__(self, labels: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._labels = dict(labels or {})


class TextFormatter(_LabelledFormatter):
    """``TIMESTAMP LEVEL LOGGER: message [engine=1 rank=0 request_id=r-1]``; the brackets only where there is a label.

    A traceback follows in lines of its own, which are indented: a line that does not begin with a timestamp belongs to
    the one before.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, and those of its traceback."""
        extras = _extras(record)
        named = {name: extras[name] for name in _SHOWN_IN_TEXT if name in extras}
        labels = " ".join(f"{name}={value}" for name, value in (self._labels | named | _request(extras)).items())
        head = f"{rfc3339(record.created)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        lines = [f"{head} [{labels}]" if labels else head]
        if record.exc_info:
            lines += [f"  {line}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(_UNSAFE.sub(_escaped, line) for line in lines)


class JSONFormatter(_LabelledFormatter):
    """An object a line, in ASCII, so that it is valid whatever encoding standard error has.

    Its fields are `timestamp`, `level`, `logger`, `message`, `request_id`, the labels, what the record carries, and
    `exception`, a traceback. What a record carries replaces none of the others. Halves of surrogate pairs, which many
    parsers refuse, become U+FFFD.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
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
    """Sends the log of this process to standard error.

    Args:
        format: ``text`` or ``json``.
        level: the lowest that is written, as a number or a name in upper case.
        labels: fields that each line of this process has.
        quiet: loggers of which only warnings and errors are written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter(labels) if format == "json" else TextFormatter(labels))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)


def report_exit(package: str, program: str, reason: object, hint: str = "") -> None:
    """Says on standard error why a program ends: as a log line where the log is JSON, else as a sentence.

    Args:
        package: the logger, ``stoker_gateway``.
        program: the command, ``stoker gateway``.
        hint: a further line for people, which JSON leaves out.
    """
    handlers = logging.getLogger().handlers
    if any(isinstance(handler.formatter, JSONFormatter) for handler in handlers):
        logging.getLogger(package).error("%s: %s", program, reason)
    else:
        print(f"{program}: {reason}", *filter(None, [hint]), sep="\n", file=sys.stderr)  # noqa: T201


def rfc3339(seconds: float) -> str:
    """A time, in seconds since 1970, as ``2026-11-23T08:51:07.512Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """What a record of ours carries besides what every record has."""
    if not record.name.startswith(_OUR_LOGGERS):
        return {}
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}


def _request(extras: Mapping[str, object]) -> dict[str, object]:
    """`request_id`: the record's own, else that of the current task's request; empty where there is neither."""
    current = extras.get("request_id") or request_id.get()
    return {} if current is None else {"request_id": current}


def _scalar(value: object) -> object:
    """The value if JSON has it (it has no NaN and no infinity), else its text."""
    is_plain = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    return "\\ufffd" if _SURROGATE.match(match[0]) else json.dumps(match[0])[1:-1]
