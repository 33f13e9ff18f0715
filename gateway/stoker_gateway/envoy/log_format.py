"""How Envoy writes its own log: with the fields of `stoker_common.logs`."""

from __future__ import annotations

from typing import Final

#: For the option ``--log-format``. `%l` is the level in lower case, `%n` the part of Envoy that logs; `%_` and `%j` are
#: the message, with its line breaks escaped or as JSON writes it.
_TEXT: Final = "%Y-%m-%dT%T.%eZ %l envoy.%n: %_"
_JSON: Final = '{"timestamp":"%Y-%m-%dT%T.%eZ","level":"%l","logger":"envoy.%n","message":"%j"}'

#: Variables that Envoy is started with. Its log's times are local, so that it must be where local time is UTC.
ENVIRONMENT: Final = {"TZ": "UTC0"}


def log_format(*, json: bool) -> str:
    """The value of ``--log-format``. It holds from the first line on; the configuration's would from the first that
    follows its reading."""
    return _JSON if json else _TEXT
