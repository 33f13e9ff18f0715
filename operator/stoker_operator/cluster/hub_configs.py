"""Cache of hub models' config.json, fetched in the background.

`get` returns at once, so callers need not wait for the network. Only public files are read, without a token, so the
configs of gated models are unknown.

    get() ─► queued ─► fetched ─► on_attempt()     after a failure, get() queues again only after a pause, which doubles

A config is `pending` from its first `get` until the first attempt to fetch it ends, but for at most `_ATTEMPT_SECONDS`:
decisions about the model may change when it arrives. No config is pending while the hub is known not to answer.

The configs of models that endpoints use are kept, and a limited number of others.

Without access to the hub there is one attempt per pause, regardless of the number of models, and one log line.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, BinaryIO, Final, NamedTuple, cast

from stoker_common.errors import ModelError
from stoker_engine.architectures.checkpoint_files import complete_config, read_header
from stoker_engine.contract.json_file import json_object
from stoker_operator.objects.facts import Key

logger = logging.getLogger(__name__)

HUB: Final = "https://huggingface.co"
#: Maximum size of a config.json (usually a few KB), and of other JSON files (an index of tens of thousands of tensors
#: has a few MB).
_MAX_BYTES: Final = 1 << 20
_MAX_INDEX_BYTES: Final = 1 << 24
#: Maximum number of models that are kept although no endpoint uses them; the least recently used is evicted.
_MAX_UNUSED: Final = 512
#: Time limit of `pending`, and the time after which an attempt starts no more reads; the last one may take as long
#: again. Including the interval of reconciles, pods wait for about 10 s at most.
_ATTEMPT_SECONDS: Final = 8.0
#: First and maximum pause after a failure, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0


class Model(NamedTuple):
    """A hub id and a revision; revision None is the default branch."""

    name: str
    revision: str | None


@dataclass
class _Known:
    """State of one model: its config, or the earliest time of the next attempt, and the endpoints that use it."""

    asked_at: float = 0.0
    config: Mapping[str, Any] | None = None
    waiting: bool = False
    tried: bool = False
    pause: float = 0.0
    retry_at: float = 0.0
    users: set[Key] = field(default_factory=set)


class HubConfigs:
    """Cache of hub models' configs, and the thread that fetches them.

    Args:
        on_attempt: called in the background thread with the model and the endpoints that use it, when its config has
            arrived, or the first attempt has ended without it.
        endpoint: base URL of the hub; the default is the value of HF_ENDPOINT, or huggingface.co.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        on_attempt: Callable[[Model, Set[Key]], None],
        endpoint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_attempt = on_attempt
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        self._offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        self._clock = clock
        self._known: dict[Model, _Known] = {}
        self._unused: OrderedDict[Model, None] = OrderedDict()
        self._uses: dict[Key, Model] = {}
        self._hub = _Known()  # the pause while the hub does not answer at all
        # Newest first: at start-up the models of all endpoints are queued at once, and an admission review may need
        # one that is queued later.
        self._queue: queue.LifoQueue[Model] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, name: str, revision: str | None, user: Key | None = None) -> Mapping[str, Any] | None:
        """Return the config, or None if it has not been fetched. Queue a fetch if one is due. Does not block.

        Args:
            name: hub id.
            revision: branch, tag or commit; None for the default branch.
            user: the endpoint that now uses this model instead of any previous model.
        """
        model = Model(name, revision)
        with self._lock:
            known = self._entry(model)
            if user is not None and self._uses.get(user) != model:
                self._release(user)
                self._uses[user] = model
                known.users.add(user)
                self._unused.pop(model, None)
            now = self._clock()
            due = known.config is None and not known.waiting and now >= max(known.retry_at, self._hub.retry_at)
            if due and not self._offline:
                known.waiting = True
                self._queue.put(model)
                self._start()
            return known.config

    def pending(self, name: str, revision: str | None) -> bool:
        """Return whether the config is pending (see the module)."""
        with self._lock:
            known = self._known.get(Model(name, revision))
            if known is None or not known.waiting or known.tried or self._hub.pause:
                return False
            return self._clock() < known.asked_at + _ATTEMPT_SECONDS

    def forget(self, user: Key) -> None:
        """Remove an endpoint from the users of its model."""
        with self._lock:
            self._release(user)

    def forget_all(self) -> None:
        """Call `forget` for all endpoints, because this replica stops leading."""
        with self._lock:
            for user in list(self._uses):
                self._release(user)

    def _entry(self, model: Model) -> _Known:
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = _Known(self._clock())
        if not known.users:
            self._unused[model] = None
            self._unused.move_to_end(model)
            self._evict()
        return known

    def _release(self, user: Key) -> None:
        model = self._uses.pop(user, None)
        if model is not None:
            self._known[model].users.discard(user)
            if not self._known[model].users:
                self._unused[model] = None
                self._evict()

    def _evict(self) -> None:
        while len(self._unused) > _MAX_UNUSED:
            model, _ = self._unused.popitem(last=False)
            del self._known[model]

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hub-configs", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self.fetch(self._queue.get())

    def fetch(self, model: Model) -> None:
        """Fetch one config now, unless requests to the hub are paused because the hub did not answer."""
        with self._lock:
            pausing = self._clock() < self._hub.retry_at
        config, failure = (None, "") if pausing else self._read(model)
        with self._lock:
            known = self._entry(model)
            first, known.tried = not known.tried, True
            known.waiting = False
            known.config = config
            if config is None and not pausing:
                self._back_off(known)
            users = frozenset(known.users)
        if config is not None or first:
            self._on_attempt(model, users)
        if failure:
            logger.info(
                "could not fetch the config.json of %s, so the model is planned only if it is well-known: %s",
                model.name,
                failure,
            )

    def _read(self, model: Model) -> tuple[Mapping[str, Any] | None, str]:
        """Return the config, or None with the reason; the reason is empty if the hub did not answer."""
        try:
            files = _HubFiles(f"{self._endpoint}/{model.name}/resolve/{_quoted(model.revision)}")
            config = complete_config(files.download("config.json", _MAX_BYTES), files)
        except urllib.error.HTTPError as error:
            self._mark_hub_reachable()
            return None, f"{error.code} {error.reason}"
        except (OSError, HTTPException, ValueError, ModelError) as error:
            if not isinstance(error, OSError | HTTPException):
                self._mark_hub_reachable()
                return None, str(error)
            self._mark_hub_silent(error)
            return None, ""
        self._mark_hub_reachable()
        return config, ""

    def _mark_hub_reachable(self) -> None:
        with self._lock:
            self._hub = _Known()

    def _mark_hub_silent(self, error: OSError | HTTPException) -> None:
        with self._lock:
            first = self._hub.pause == 0
            self._back_off(self._hub)
        if first:
            logger.warning(
                "%s does not answer (%s); models that are not well-known and whose config.json has not been fetched "
                "are not planned: their engines check at start whether they fit",
                self._endpoint,
                error,
            )

    def _back_off(self, known: _Known) -> None:
        known.pause = min(known.pause * 2, _LONGEST_PAUSE) if known.pause else _FIRST_PAUSE
        known.retry_at = self._clock() + known.pause


def _quoted(revision: str | None) -> str:
    return urllib.parse.quote(revision or "main", safe="")


class _HubFiles:
    """`CheckpointFiles` of one model, with one deadline for all files.

    Args:
        url: base URL of the files.
    """

    weights = ("model.safetensors",)

    def __init__(self, url: str) -> None:
        self._url = url
        self._until = time.monotonic() + _ATTEMPT_SECONDS

    def json(self, name: str) -> Mapping[str, Any] | None:
        """See `CheckpointFiles`. Raises the errors of `download`."""
        try:
            return self.download(name, _MAX_INDEX_BYTES)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def header(self, name: str) -> Mapping[str, Any] | None:
        """See `CheckpointFiles`. Only the file's header is read."""
        try:
            with self._open(urllib.parse.quote(name)) as response:
                return read_header(cast(BinaryIO, _DeadlineReader(response, self._until)))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def download(self, name: str, max_bytes: int) -> Mapping[str, Any]:
        """Return the JSON object in a file of at most `max_bytes`.

        Raises:
            OSError: there was no complete answer in time, or it had an error status (HTTPError).
            ValueError: the file is larger.
            ModelError: the file is not a JSON object.
        """
        body = b""
        with self._open(name) as response:
            reader = _DeadlineReader(response, self._until)
            while part := reader.read(max_bytes):
                body += part
                if len(body) > max_bytes:
                    raise ValueError(f"{name} is larger than {max_bytes} bytes")
        return json_object(body, name)

    def _open(self, name: str) -> Any:
        request = urllib.request.Request(f"{self._url}/{name}", headers={"User-Agent": "stoker-operator"})
        return urllib.request.urlopen(request, timeout=max(self._until - time.monotonic(), 0.001))


class _DeadlineReader:
    """Reads an HTTP answer until a deadline. A read that has started waits for the socket's timeout instead."""

    def __init__(self, response: Any, until: float) -> None:
        self._response, self._until = response, until

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, or none at the end of the answer.

        Raises:
            TimeoutError: the deadline has passed.
        """
        if time.monotonic() > self._until:
            raise TimeoutError(f"the answer took more than {_ATTEMPT_SECONDS:.0f} s")
        return bytes(self._response.read1(size))
