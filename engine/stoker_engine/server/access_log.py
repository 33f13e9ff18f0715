"""uvicorn's access log, without what asks every few seconds and is answered well."""

from __future__ import annotations

import logging

_ACCESS = logging.getLogger("uvicorn.access")


class _SkipSuccesses(logging.Filter):
    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        args = record.args
        if not isinstance(args, tuple) or len(args) != 5:
            return True
        _, _, path, _, status = args
        return not (str(path).partition("?")[0] in self._paths and status == 200)


def skip_successes(paths: str) -> None:
    """Leaves requests to `paths`, separated by commas, out of the access log while they are answered with 200."""
    for old in [entry for entry in _ACCESS.filters if isinstance(entry, _SkipSuccesses)]:
        _ACCESS.removeFilter(old)
    _ACCESS.addFilter(_SkipSuccesses(frozenset(path.strip() for path in paths.split(",") if path.strip())))
