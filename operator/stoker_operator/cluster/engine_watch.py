"""Which engines of a model serve, and which ranks they lack, in pods where several processes compute: polled now and
then, since nothing in the cluster changes when one of them dies. Where none serves the pod is not ready, and why is
known to it alone.

Stoker's engine says it at ``/copies`` (`contract.engine_state`); other runtimes do not say.

As in `engine_facts`, answers are not trusted, are bounded in bytes and time, and nobody waits for them.
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

#: No pod has more engines, and none of them more ranks.
_MAX_ENGINES: Final = 64
_MAX_RANKS: Final = 64
#: Of blocks and tokens.
_MAX_COUNT: Final = 10**12
#: Of the answer, and of a sentence in it that is passed on.
_MAX_BYTES: Final = 64 << 10
_MAX_MESSAGE_LENGTH: Final = 400
_TIMEOUT_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 5.0
_MAX_CONCURRENT_REQUESTS: Final = 16
#: So often a pod may not answer before what it said is forgotten.
_PATIENCE: Final = 3


async def ask(metrics_url: str, seconds: float) -> EngineStates | None:
    """The engines of the server whose metrics are at `metrics_url`; None where it does not answer, or does not say."""
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
    """Whether these numbers fit into a status."""
    small = state.number < _MAX_ENGINES and state.ranks <= _MAX_RANKS and len(state.missing_ranks) <= state.ranks
    return small and all(each is None or each < _MAX_COUNT for each in (state.kv_blocks, state.kv_tokens))


def _bounded(state: EngineState) -> EngineState:
    missing = tuple(sorted(rank for rank in set(state.missing_ranks) if rank < state.ranks))
    return dataclasses.replace(state, missing_ranks=missing, message=_sentence(state.message))


def _sentence(text: str) -> str:
    """What is passed on: words in a line."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())[:_MAX_MESSAGE_LENGTH]


@dataclass
class _Watched:
    """A pod: where its metrics are, what it said last, and how often it has been silent since."""

    url: str
    states: EngineStates | None = None
    silent: int = 0


class EngineWatch:
    """The engines of endpoints' pods, requested in the background.

    Args:
        told: called with the endpoint of which something is new; in a thread of ours.
        every: seconds between two requests to a pod.
    """

    def __init__(self, on_change: Callable[[Key], None], every: float = _EVERY_SECONDS) -> None:
        self._on_change = on_change
        self._every = every
        self._watched: dict[Key, dict[str, dict[str, _Watched]]] = {}
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("engine-watch")
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    def engine_states(self, key: Key, workload: str, urls: Mapping[str, str]) -> dict[str, EngineStates]:
        """What pods of the endpoint's workload have said last, by pod; from now on these are asked, and no others.

        Args:
            key: which endpoint.
            workload: which of its workloads.
            urls: where the pods' metrics are.
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
        """There is no such endpoint any more."""
        with self._lock:
            self._watched.pop(key, None)

    def forget_all(self) -> None:
        """Nobody is to be asked any more; the work goes to another replica."""
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
