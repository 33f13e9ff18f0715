"""Which copies of a model serve, in pods that have several: requested now and then, since nothing in the cluster
changes when one of them dies and others of its pod go on.

The engine's metrics say it: ``stoker:engine_up`` of each copy, and its ``vllm:cache_config_info``. Where one is down,
``/health`` says why. An engine without these metrics is not known to have copies.

As in `engine_facts`, answers are not trusted, are bounded in bytes and time, and nobody waits for them.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from stoker_operator.engine_facts import fetch, labels, number
from stoker_operator.facts import Copies, Copy, Key
from stoker_operator.own_thread import OwnLoop

_UP: Final = re.compile(rb"^stoker:engine_up\{([^\n]*)\} ([01])(?:\.0)?$", re.MULTILINE)
_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
#: No pod has more copies.
_MOST_COPIES: Final = 64
#: Of ``/health``, and of what is passed on of it.
_MOST_BYTES: Final = 16 << 10
_MOST_SAID: Final = 400
_TIMEOUT_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 5.0
_MOST_AT_A_TIME: Final = 16
#: So often a pod may not answer before what it said is forgotten.
_PATIENCE: Final = 3


async def ask(metrics_url: str, seconds: float) -> Copies | None:
    """The copies of the engine whose metrics are at `metrics_url`; None where it does not answer, or does not say."""
    metrics = await fetch(metrics_url, seconds)
    copies = () if metrics is None else _read(metrics)
    if not copies:
        return None
    if all(copy.serves for copy in copies):
        return Copies(copies)
    said = await fetch(metrics_url.removesuffix("/metrics") + "/health", seconds, _MOST_BYTES)
    return Copies(copies, _sentence(said or b""))


def _read(metrics: bytes) -> tuple[Copy, ...]:
    caches = {told.get("engine", ""): told for told in map(labels, _few(_CACHE, metrics))}
    copies = {}
    for found in _few(_UP, metrics):
        which = labels(found).get("engine", "")
        index = number(which)
        if index is None or index >= _MOST_COPIES:
            continue
        cache = caches.get(which, {})
        blocks, tokens = number(cache.get("num_gpu_blocks", "")), number(cache.get("kv_cache_size_tokens", ""))
        copies[index] = Copy(index, found[2] == b"1", blocks, tokens)
    return tuple(copies[index] for index in sorted(copies))


def _few(pattern: re.Pattern[bytes], text: bytes) -> list[re.Match[bytes]]:
    return [found for found, _ in zip(pattern.finditer(text), range(_MOST_COPIES), strict=False)]


def _sentence(said: bytes) -> str:
    """What is passed on: words in a line."""
    text = "".join(character if character.isprintable() else " " for character in said.decode(errors="replace"))
    return " ".join(text.split())[:_MOST_SAID]


@dataclass
class _Watched:
    """A pod: where its metrics are, what it said last, and how often it has been silent since."""

    url: str
    said: Copies | None = None
    silent: int = 0


class CopyWatch:
    """The copies of endpoints' pods, requested in the background.

    Args:
        told: called with the endpoint of which something is new; in a thread of ours.
        every: seconds between two requests to a pod.
    """

    def __init__(self, told: Callable[[Key], None], every: float = _EVERY_SECONDS) -> None:
        self._told = told
        self._every = every
        self._watched: dict[Key, dict[str, dict[str, _Watched]]] = {}
        self._lock = threading.Lock()
        self._loop = OwnLoop("copy-watch")
        self._turns = asyncio.Semaphore(_MOST_AT_A_TIME)

    def copies(self, key: Key, workload: str, urls: Mapping[str, str]) -> dict[str, Copies]:
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
            return {pod: watched.said for pod, watched in now.items() if watched.said is not None}

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
            async with self._turns:
                said = await ask(watched.url, _TIMEOUT_SECONDS)
            with self._lock:
                watched.silent = 0 if said is not None else watched.silent + 1
                before = watched.said
                if said is not None or watched.silent >= _PATIENCE:
                    watched.said = said
                is_news = watched.said != before
            if is_news:
                self._told(key)
            await asyncio.sleep(self._every)

    def _is_watched(self, key: Key, workload: str, pod: str, watched: _Watched) -> bool:
        with self._lock:
            return self._watched.get(key, {}).get(workload, {}).get(pod) is watched
