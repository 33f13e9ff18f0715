"""The billing log: a JSON line for each request that used tokens, without prompts, outputs or secrets.

A thread writes the file, so that the event loop does not wait for the disk. If the file is renamed, for example by log
rotation, the next line creates a new file with the old name.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import orjson

from stoker_common.logs import rfc3339
from stoker_gateway.usage.completed_request import CompletedRequest

logger = logging.getLogger(__name__)

#: Destination that means standard output.
STDOUT: Final = "-"
#: Maximum number of queued lines, for example while the disk is full. Further lines are lost, and an error is logged.
MAX_LINES: Final = 200_000
#: Seconds until a failed write is retried.
_AGAIN_S: Final = 1.0
#: Maximum time for writing the last lines at shutdown, in seconds.
_CLOSE_S: Final = 10.0
_MODE: Final = 0o640


class BillingLog:
    """Writes the billing log until `close`.

    Args:
        destination: file to which lines are appended, or ``-`` for standard output.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, destination: str) -> None:
        self._path = None if destination == STDOUT else Path(destination)
        self._file = sys.stdout.fileno() if self._path is None else _opened(self._path)
        self._lines: deque[bytes] = deque()
        self._has_lines = threading.Event()
        self._closing = threading.Event()
        self._lost = 0
        self._is_losing = False
        self._in_line = False
        self._thread = threading.Thread(target=self._write_on, name="billing", daemon=True)
        self._thread.start()

    def ended(self, ended: CompletedRequest) -> None:
        """Queue the line of a request; requests without tokens are skipped."""
        if not ended.tokens.prompt and not ended.tokens.output:
            return
        if len(self._lines) >= MAX_LINES:
            if not self._is_losing:
                logger.error("the billing log could not be written for too long: lines are lost")
            self._is_losing = True
            self._lost += 1
            return
        self._lines.append(line(ended))
        self._has_lines.set()

    def close(self) -> None:
        """Write the queued lines for up to `_CLOSE_S`; log the number of lost lines."""
        self._closing.set()
        self._has_lines.set()
        self._thread.join(_CLOSE_S)
        if num_lost := self._lost + len(self._lines):
            logger.error("%d lines of the billing log were lost", num_lost)

    def _write_on(self) -> None:
        while not self._closing.is_set() or self._lines:
            self._has_lines.wait()
            self._has_lines.clear()
            try:
                self._write_all()
            except OSError as error:
                logger.error("the billing log cannot be written; retrying: %s", error)
                time.sleep(_AGAIN_S)
                self._has_lines.set()

    def _write_all(self) -> None:
        """Write the queued lines. After a partial write, the rest of the line stays at the head of the queue."""
        while self._lines:
            if self._path is not None and not self._in_line and not _is_at(self._file, self._path):
                os.close(self._file)
                self._file = _opened(self._path)
            remaining = self._lines[0]
            written = os.write(self._file, remaining)
            self._in_line = written < len(remaining)
            if self._in_line:
                self._lines[0] = remaining[written:]
            else:
                self._lines.popleft()
        self._is_losing = False  # a later loss is logged again


def line(ended: CompletedRequest) -> bytes:
    """Return the line of a request; its time is the start of the request."""
    used = ended.tokens
    fields = {
        "time": rfc3339(ended.began),
        "key": ended.key or None,
        "model": ended.model,
        "prompt_tokens": used.prompt,
        "cached_tokens": used.cached,
        "output_tokens": used.output,
        "estimated": used.estimated,
        "aborted": ended.aborted,
        "request_id": ended.request_id[:128],
        "status": ended.status or None,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
