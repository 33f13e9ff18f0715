"""Polls the states of engines, and which of their ranks are missing, in pods where several processes compute.

Polling is needed because an engine can die without a change of the Pod object, and because only the pod knows why its
engines do not accept requests. Stoker's runtime reports its engines' states at ``/copies`` (`contract.engine_state`);
vLLM does not.

As in `engine_facts`, answers are not trusted, requests have limits of bytes and time, and reconciles do not wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from stoker_common.bounded_fetch import fetch
from stoker_engine.contract.engine_state import EngineState
from stoker_operator.objects.facts import EngineStates, Key
from stoker_operator.process.background_loop import BackgroundLoop

#: Maximum numbers of engines in a pod and of ranks of an engine; states beyond these limits are discarded.
_MAX_ENGINES: Final = 64
_MAX_RANKS: Final = 64
#: Exclusive upper bound of an engine's numbers of KV-cache blocks and tokens.
_MAX_COUNT: Final = 10**12
#: Maximum sizes of an answer, in bytes, and of an engine's message in it, in characters.
_MAX_BYTES: Final = 64 << 10
_MAX_MESSAGE_LENGTH: Final = 400
_TIMEOUT_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 5.0
_MAX_CONCURRENT_REQUESTS: Final = 16
#: Number of consecutive failed requests after which a pod's last answer is discarded.
_PATIENCE: Final = 3


async def ask(metrics_url: str, seconds: float) -> EngineStates | None:
    """Request the states of a pod's engines; return None without a valid answer within `seconds`."""
    body = await fetch(metrics_url.removesuffix("/metrics") + "/copies", seconds, _MAX_BYTES)
    return None if body is None else _read(body)


def _read(body: bytes) -> EngineStates | None:
    try:
        every = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(every, list):
        return None
    found = (EngineState.from_dict(each) for each in every[:_MAX_ENGINES])
    engines = {each.number: _bounded(each) for each in found if each is not None and _is_likely(each)}
    return EngineStates(tuple(engines[number] for number in sorted(engines))) if engines else None


def _is_likely(state: EngineState) -> bool:
    """Return whether the numbers of an engine's state are within the limits."""
    small = state.number < _MAX_ENGINES and state.ranks <= _MAX_RANKS and len(state.missing_ranks) <= state.ranks
    return small and all(each is None or each < _MAX_COUNT for each in (state.kv_blocks, state.kv_tokens))


def _bounded(state: EngineState) -> EngineState:
    missing = tuple(sorted(rank for rank in set(state.missing_ranks) if rank < state.ranks))
    return dataclasses.replace(state, missing_ranks=missing, message=_sentence(state.message))


def _sentence(text: str) -> str:
    """Return a message as one line of printable text, truncated."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())[:_MAX_MESSAGE_LENGTH]


@dataclass
class _Watched:
    """A polled pod: its metrics' URL, last valid answer unless discarded, and number of failed requests since."""

    url: str
    states: EngineStates | None = None
    silent: int = 0


class EngineWatch:
    """The engines of endpoints' pods, polled in the background.

    Args:
        on_change: called in the background thread with the endpoint whose engines' states have changed.
        every: pause between two requests to a pod, in seconds.
    """

    def __init__(self, on_change: Callable[[Key], None], every: float = _EVERY_SECONDS) -> None:
        self._on_change = on_change
        self._every = every
        self._watched: dict[Key, dict[str, dict[str, _Watched]]] = {}
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("engine-watch")
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    def engine_states(self, key: Key, workload: str, urls: Mapping[str, str]) -> dict[str, EngineStates]:
        """Return the known states of these pods' engines, by pod. From now on, poll only these of the workload's pods.

        Args:
            key: the endpoint.
            workload: name of the workload.
            urls: URLs of the pods' metrics, by pod.
        """
        with self._lock:
            before = self._watched.setdefault(key, {}).get(workload, {})
            now = {pod: before[pod] for pod, url in urls.items() if pod in before and before[pod].url == url}
            for pod, url in urls.items():
                if pod not in now:
                    now[pod] = _Watched(url)
                    self._loop.run(self._watch(key, workload, pod, now[pod]))
            self._watched[key][workload] = now
            return {pod: watched.states for pod, watched in now.items() if watched.states is not None}

    def forget(self, key: Key) -> None:
        """Stop polling an endpoint's pods."""
        with self._lock:
            self._watched.pop(key, None)

    def forget_all(self) -> None:
        """Stop polling all pods, because this replica stops leading."""
        with self._lock:
            self._watched.clear()

    async def _watch(self, key: Key, workload: str, pod: str, watched: _Watched) -> None:
        while self._is_watched(key, workload, pod, watched):
            async with self._slots:
                states = await ask(watched.url, _TIMEOUT_SECONDS)
            with self._lock:
                watched.silent = 0 if states is not None else watched.silent + 1
                before = watched.states
                if states is not None or watched.silent >= _PATIENCE:
                    watched.states = states
                is_news = watched.states != before
            if is_news:
                self._on_change(key)
            await asyncio.sleep(self._every)

    def _is_watched(self, key: Key, workload: str, pod: str, watched: _Watched) -> bool:
        with self._lock:
            return self._watched.get(key, {}).get(workload, {}).get(pod) is watched
