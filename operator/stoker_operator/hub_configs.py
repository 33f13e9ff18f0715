"""config.json of hub models, fetched in the background and kept in memory.

Whoever asks gets what is there at once, and asks again when he is told that it has arrived: admission must not wait for
a network, and reconcile need not. Only public files are read, without a token; of a gated model, plans say that its
shape is not known.

    asked for ─► queued ─► fetched ─► told        a failure is remembered, and tried again after a pause that doubles

A cluster without a way to the hub costs one attempt a pause, whatever number of models is asked for, and one line in
the log.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

HUB: Final = "https://huggingface.co"
#: Configs are a few kilobytes; what is larger is none.
_MOST_BYTES: Final = 1 << 20
#: Models that are remembered; the one that was asked for longest ago goes first.
_MOST_MODELS: Final = 512
_TIMEOUT_SECONDS: Final = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0


class Model(NamedTuple):
    """A hub id at a revision; None is the default branch."""

    name: str
    revision: str | None


@dataclass
class _Known:
    """What is known of one model: its config, or when to try again."""

    config: Mapping[str, Any] | None = None
    waiting: bool = False
    pause: float = 0.0
    retry_at: float = 0.0


class HubConfigs:
    """The configs.

    Args:
        arrived: called with hub id and revision when a config has arrived; in a thread of ours.
        endpoint: base URL of the hub; absent, what HF_ENDPOINT says.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        arrived: Callable[[str, str | None], None],
        endpoint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrived = arrived
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        self._offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        self._clock = clock
        self._known: OrderedDict[Model, _Known] = OrderedDict()
        self._hub = _Known()  # its pause, where it does not answer at all
        self._queue: queue.SimpleQueue[Model] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, name: str, revision: str | None) -> Mapping[str, Any] | None:
        """The config, where it is there; None: not, or not yet. Never waits."""
        model = Model(name, revision)
        with self._lock:
            known = self._known.setdefault(model, _Known())
            self._known.move_to_end(model)
            while len(self._known) > _MOST_MODELS:
                self._known.popitem(last=False)
            now = self._clock()
            due = known.config is None and not known.waiting and now >= max(known.retry_at, self._hub.retry_at)
            if due and not self._offline:
                known.waiting = True
                self._queue.put(model)
                self._start()
            return known.config

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hub-configs", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self.fetch(self._queue.get())

    def fetch(self, model: Model) -> None:
        """Fetches one config now, unless the hub has just been found not to answer."""
        with self._lock:
            pausing = self._clock() < self._hub.retry_at
        config, failure = (None, "") if pausing else self._read(model)
        with self._lock:
            known = self._known.setdefault(model, _Known())
            known.waiting = False
            known.config = config
            if config is None and not pausing:
                self._pause(known)
        if config is not None:
            self._arrived(*model)
        elif failure:
            logger.info("%s cannot be planned by its config.json, which the hub does not give: %s", model.name, failure)

    def _read(self, model: Model) -> tuple[Mapping[str, Any] | None, str]:
        """The config, or why there is none."""
        try:
            config = _download(f"{self._endpoint}/{model.name}/resolve/{_quoted(model.revision)}/config.json")
        except urllib.error.HTTPError as error:
            self._answers()
            return None, f"{error.code} {error.reason}"
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                self._answers()
                return None, str(error)
            self._silent(error)
            return None, ""
        self._answers()
        return config, ""

    def _answers(self) -> None:
        with self._lock:
            self._hub = _Known()

    def _silent(self, error: OSError) -> None:
        with self._lock:
            first = self._hub.pause == 0
            self._pause(self._hub)
        if first:
            logger.warning(
                "%s does not answer (%s); models outside the table of well-known ones are not planned, and their "
                "engines judge at start",
                self._endpoint,
                error,
            )

    def _pause(self, known: _Known) -> None:
        known.pause = min(known.pause * 2, _LONGEST_PAUSE) if known.pause else _FIRST_PAUSE
        known.retry_at = self._clock() + known.pause


def _quoted(revision: str | None) -> str:
    return urllib.parse.quote(revision or "main", safe="")


def _download(url: str) -> Mapping[str, Any]:
    """The JSON object at `url`.

    Raises:
        OSError: there was no answer; HTTPError: another answer.
        ValueError: it is no JSON object.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "stoker-operator"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        body = response.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ValueError(f"config.json is larger than {_MOST_BYTES} bytes")
    try:
        config = json.loads(body)
    except ValueError:
        raise ValueError("config.json is no JSON") from None
    if not isinstance(config, dict):
        raise ValueError("config.json holds no object")
    return config
