"""Filter that leaves some paths out of uvicorn's access log."""

from __future__ import annotations

import logging

_ACCESS = logging.getLogger("uvicorn.access")


class _SkipPaths(logging.Filter):
    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        args = record.args
        if not isinstance(args, tuple) or len(args) != 5:
            return True
        return str(args[2]).partition("?")[0] not in self._paths


def skip_paths(paths: str) -> None:
    """Leave requests for `paths`, separated by commas, out of the access log. Replaces the paths of earlier calls."""
    for old in [entry for entry in _ACCESS.filters if isinstance(entry, _SkipPaths)]:
        _ACCESS.removeFilter(old)
    _ACCESS.addFilter(_SkipPaths(frozenset(path.strip() for path in paths.split(",") if path.strip())))
