"""Format of Envoy's own log, with the fields of `stoker_common.logs`."""

from __future__ import annotations

from typing import Final

#: For the option ``--log-format``. `%l` is the level in lower case, `%n` the part of Envoy that logs; `%_` and `%j` are
#: the message, with its line breaks escaped or as JSON writes it.
_TEXT: Final = "%Y-%m-%dT%T.%eZ %l envoy.%n: %_"
_JSON: Final = '{"timestamp":"%Y-%m-%dT%T.%eZ","level":"%l","logger":"envoy.%n","message":"%j"}'

#: Environment variables for Envoy. It logs local time, so its time zone must be UTC.
ENVIRONMENT: Final = {"TZ": "UTC0"}


def log_format(*, json: bool) -> str:
    """Return the value of ``--log-format``. The flag applies from the first log line, whereas a format in the
    configuration would apply only after it has been read."""
    return _JSON if json else _TEXT
