"""Format of Envoy's own log, with the fields of `stoker_common.logs`."""

from __future__ import annotations

from typing import Final

#: Values of the flag ``--log-format``. `%l` is the level in lower case, `%n` the name of the logger, `%_` the message
#: with escaped line breaks, `%j` the message escaped for JSON.
_TEXT: Final = "%Y-%m-%dT%T.%eZ %l envoy.%n: %_"
_JSON: Final = '{"timestamp":"%Y-%m-%dT%T.%eZ","level":"%l","logger":"envoy.%n","message":"%j"}'

#: Environment variables for Envoy. It logs local time, so its time zone must be UTC.
ENVIRONMENT: Final = {"TZ": "UTC0"}


def log_format(*, json: bool) -> str:
    """Return the value of ``--log-format``. The flag applies from the first log line, whereas a format in the
    configuration would apply only after Envoy has read it."""
    return _JSON if json else _TEXT
