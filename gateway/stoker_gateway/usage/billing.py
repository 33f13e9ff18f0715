"""The log for billing: a line of JSON for each request that used tokens. No prompts, no answers, no secrets.

A thread writes it, so that nothing waits for a disk. A file that is renamed is followed by a new one by the old name,
at the next line; nobody has to be told.
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

#: What stands for standard output.
STDOUT: Final = "-"
#: Lines that wait for a disk that is full, or a reader that does not read. Later ones are lost, which the log tells.
MAX_LINES: Final = 200_000
#: Seconds until a line is tried again.
_AGAIN_S: Final = 1.0
#: Seconds that the last lines may take in the end.
_CLOSE_S: Final = 10.0
_MODE: Final = 0o640


class BillingLog:
    """Writes the log, from `BillingLog(…)` to `close`.

    Args:
        destination: a file, which is added to, or ``-``: standard output.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, destination: str) -> None:
        self._path = None if destination == STDOUT else Path(destination)
        self._file = sys.stdout.fileno() if self._path is None else _opened(self._path)
        self._lines: deque[bytes] = deque()
        self._has_lines = threading.Event()
        self._closing = threading.Event()
        self._lost = 0
        self._in_line = False
        self._thread = threading.Thread(target=self._write_on, name="billing", daemon=True)
        self._thread.start()

    def ended(self, ended: CompletedRequest) -> None:
        """Takes note of a request; says nothing of one that used no tokens."""
        if not ended.tokens.prompt and not ended.tokens.output:
            return
        if len(self._lines) >= MAX_LINES:
            if not self._lost:
                logger.error("the billing log could not be written for too long: lines are lost from now on")
            self._lost += 1
            return
        self._lines.append(line(ended))
        self._has_lines.set()

    def close(self) -> None:
        """Writes what there is, and ends."""
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
                logger.error("the billing log cannot be written, and is tried again: %s", error)
                time.sleep(_AGAIN_S)
                self._has_lines.set()

    def _write_all(self) -> None:
        """Each line is written once: what is left of one that was written in part comes first the next time."""
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


def line(ended: CompletedRequest) -> bytes:
    """What is written of a request; its time is when it began."""
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
