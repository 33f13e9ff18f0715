"""The keys that servers want, from the Secrets that endpoints name in ``spec.auth``: each is read by its name alone,
since the gateway may read no others. They are read again now and then, and when an endpoint has changed.

A Secret that is not there, or may not be read, has no key: its endpoints' requests are refused, and never sent without.
While the API server does not answer, the last key stays.
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

#: Seconds between two times a Secret is read, at most; a part of it is drawn by lot.
PERIOD_S: Final = 30.0
#: Seconds until one that has no key is read again: at first, then doubled up to the period.
_FIRST_WAIT_S: Final = 1.0
#: The entry that all runtimes read.
_ENTRY: Final = "api-key"


@dataclass
class _Secret:
    """What is known of a Secret.

    Attributes:
        stamp: for which state of its endpoints it was read.
        due: when it is to be read, by the clock.
        key: None while it has none, or may not be read.
        failures: in a row.
        complaint: what was said of it.
    """

    stamp: object
    due: float
    key: str | None = None
    failures: int = 0
    complaint: str = ""


class Credentials:
    """Keeps the keys of servers. `run` is a thread's; the rest may be called by others.

    Args:
        changed: told, in the thread, that a key has.
        clock: seconds.
    """

    def __init__(self, api: Api, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._changed = changed
        self._clock = clock
        self._condition = threading.Condition()
        self._secrets: dict[Name, _Secret] = {}
        self._stopped = False

    def set_secrets(self, secrets: Mapping[Name, object]) -> None:
        """These are all Secrets to read, from now on.

        Args:
            secrets: with what stands for the state of the endpoints that name it: when that is another, it is read.
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
        """The keys that are known."""
        with self._condition:
            return {name: secret.key for name, secret in self._secrets.items() if secret.key is not None}

    def stop(self) -> None:
        """Has `run` end."""
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def run(self) -> None:
        """Reads what is due, until `stop`."""
        while (name := self._next()) is not None:
            try:
                key, problem = first_key(self._api.get(f"/api/v1/namespaces/{name[0]}/secrets/{name[1]}")), ""
                if key is None:
                    problem = "it has no usable key in the first line of its entry api-key, or else of its first entry"
                self._read(name, key, problem, keep=False)
            except ApiError as error:
                self._read(name, None, str(error), keep=error.status not in (403, 404))

    def _next(self) -> Name | None:
        """Waits for a Secret to be due; None: it is to end."""
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
            previous_complaint, secret.complaint = secret.complaint, problem
            changed = secret.key != before
            kept = secret.key is not None
        if problem and problem != previous_complaint:
            consequence = (
                "its last key stays in use" if kept else "requests for the endpoints that name it are rejected"
            )
            logger.error(
                "the Secret %s/%s with the API key of servers cannot be read: %s; %s", *name, problem, consequence
            )
        elif previous_complaint and not problem:
            logger.info("the Secret %s/%s can be read again", *name)
        if changed:
            self._changed()


def first_key(secret: Mapping[str, Any]) -> str | None:
    """The key of a Secret that is sent: of the entry ``api-key``, which all runtimes read, or else of the first by
    name that is not hidden. None where it is none that a header may have.
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
