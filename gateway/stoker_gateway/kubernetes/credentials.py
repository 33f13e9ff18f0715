"""The servers' API keys, from the Secrets that endpoints name in ``spec.auth``.

The gateway may read these Secrets only by name, so it cannot watch them all. It reads each periodically, and when an
endpoint that names it changes. The key of a Secret that does not exist, is unusable or may not be read is not known
(see `KeyHistory.update`). After other errors the last key stays in use.
"""

from __future__ import annotations

import base64
import binascii
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_gateway.kubernetes.api import Api, ApiError
from stoker_gateway.kubernetes.watch import Name

logger = logging.getLogger(__name__)

#: Interval of reads of a Secret in seconds; up to 20 % are subtracted at random.
PERIOD_S: Final = 30.0
#: Seconds until a Secret is read again after a failure: doubled with each failure, up to `PERIOD_S`.
_FIRST_WAIT_S: Final = 1.0
#: Entry of a Secret that all runtimes read.
_ENTRY: Final = "api-key"


@dataclass
class _Secret:
    """State of a Secret.

    Attributes:
        stamp: state of the endpoints that name it, at the last `set_secrets`.
        due: time of the next read, by the clock.
        key: the key; None if it is not known.
        failures: number of failures since the last success or change of `stamp`.
        logged_error: error of the last read; empty if it succeeded.
    """

    stamp: object
    due: float
    key: str | None = None
    failures: int = 0
    logged_error: str = ""


class Credentials:
    """Reads and stores the servers' API keys. `run` is the main function of a thread; the other methods are
    thread-safe.

    Args:
        changed: called in the thread when a read has changed a key.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, api: Api, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._changed = changed
        self._clock = clock
        self._condition = threading.Condition()
        self._secrets: dict[Name, _Secret] = {}
        self._stopped = False

    def set_secrets(self, secrets: Mapping[Name, object]) -> None:
        """Set the Secrets to read.

        Args:
            secrets: Secret → state of the endpoints that name it; if the state changes, the Secret is read again.
        """
        with self._condition:
            for removed in self._secrets.keys() - secrets.keys():
                del self._secrets[removed]
            for name, stamp in secrets.items():
                known = self._secrets.get(name)
                if known is None:
                    self._secrets[name] = _Secret(stamp, self._clock())
                elif known.stamp != stamp:
                    known.stamp, known.due, known.failures = stamp, self._clock(), 0
            self._condition.notify()

    def keys(self) -> dict[Name, str]:
        """Return the known keys by Secret."""
        with self._condition:
            return {name: secret.key for name, secret in self._secrets.items() if secret.key is not None}

    def stop(self) -> None:
        """Make `run` return."""
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def run(self) -> None:
        """Read Secrets when they are due, until `stop` is called."""
        while (name := self._next()) is not None:
            try:
                key, problem = first_key(self._api.get(f"/api/v1/namespaces/{name[0]}/secrets/{name[1]}")), ""
                if key is None:
                    problem = "no entry has a line with text, or the first such line is not printable ASCII"
                self._read(name, key, problem, keep=False)
            except ApiError as error:
                self._read(name, None, str(error), keep=error.status not in (403, 404))

    def _next(self) -> Name | None:
        """Wait until a Secret is due, and return its name; None after `stop`."""
        with self._condition:
            while not self._stopped:
                now = self._clock()
                name = min(self._secrets, key=lambda each: self._secrets[each].due, default=None)
                if name is not None and self._secrets[name].due <= now:
                    self._secrets[name].due = now + PERIOD_S * (0.8 + 0.2 * random.random())
                    return name
                self._condition.wait(None if name is None else self._secrets[name].due - now)
        return None

    def _read(self, name: Name, key: str | None, problem: str, *, keep: bool) -> None:
        with self._condition:
            secret = self._secrets.get(name)
            if secret is None:
                return
            before = secret.key
            if not keep:
                secret.key = key
            if problem:
                wait_s = min(PERIOD_S, _FIRST_WAIT_S * 2.0 ** min(secret.failures, 10))
                secret.due, secret.failures = min(secret.due, self._clock() + wait_s), secret.failures + 1
            else:
                secret.failures = 0
            previous_error, secret.logged_error = secret.logged_error, problem
            changed = secret.key != before
            kept = secret.key is not None
        if problem and problem != previous_error:
            consequence = (
                "its last key stays in use"
                if kept
                else "requests for endpoints that name it are rejected, unless their previous Secret's key is known"
            )
            logger.error(
                "the Secret %s/%s with the API key of servers cannot be read: %s; %s", *name, problem, consequence
            )
        elif previous_error and not problem:
            logger.info("the Secret %s/%s can be read again", *name)
        if changed:
            self._changed()


def first_key(secret: Mapping[str, Any]) -> str | None:
    """Return the key of a Secret: the first line with text of the entry ``api-key`` or, if that has none, of the first
    other entry by name that has one and is not hidden. None without such a line, or if a header cannot contain it.
    """
    data = secret.get("data")
    if not isinstance(data, Mapping):
        return None
    names = sorted(str(name) for name in data if not str(name).startswith("."))
    for name in [_ENTRY, *names] if _ENTRY in names else names:
        try:
            text = base64.b64decode(str(data[name]), validate=True).decode()
        except (binascii.Error, ValueError):
            continue
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if lines:
            return lines[0] if lines[0].isascii() and lines[0].isprintable() else None
    return None
