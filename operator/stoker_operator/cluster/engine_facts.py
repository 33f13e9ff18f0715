"""What a running engine reports that was only predicted before: one request to one pod after a roll-out, and
some more where that is not answered.

The number of KV-cache blocks is in vLLM's metric ``vllm:cache_config_info``, which Stoker's engine has as well; how its
weights and its cache are stored is in ``stoker:model_info``, which only Stoker's has. Where an engine cannot be
reached, for example because a policy keeps the operator from pods, only these facts are missing.

A tenant chooses the image, so the answer is not trusted. Requests are made in a thread and an event loop of their
own, so many at a time, and nothing waits for them: results are reported when they arrive. Each is bounded in bytes, as
they are received, and in time, from its beginning to its end; no redirect is followed, and nothing is decompressed.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.bounded_fetch import fetch
from stoker_operator.objects.facts import Key, Reported
from stoker_operator.process.background_loop import BackgroundLoop

_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_MODEL: Final = re.compile(rb"^stoker:model_info\{([^\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(rb'(?:^|,)([a-z_]{1,64})="([^"\\\n]{0,256})"')
#: What is told of formats: their names, and nothing that could be more than names.
_WORDS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _,:.()×-]{0,255}")
#: Metrics of an engine with many data-parallel ranks are some hundred kilobytes.
_MAX_BYTES: Final = 2 << 20
#: Of a label that is a number.
_MAX_DIGITS: Final = 12
_TIMEOUT_SECONDS: Final = 2.0
_MAX_CONCURRENT_REQUESTS: Final = 16
#: After a pod did not answer, it is not requested again for so long.
_PAUSE_SECONDS: Final = 2.0


def metrics_url(container: Mapping[str, Any], address: str) -> str:
    """Where the engine in this container, of a pod at `address`, serves its metrics: the address of its probe."""
    probe = container.get("readinessProbe", {}).get("httpGet", {})
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    host = f"[{address}]" if ":" in address else address
    return f"{probe.get('scheme', 'HTTP').lower()}://{host}:{port}/metrics"


async def ask(url: str, seconds: float) -> Reported | None:
    """What the engine reports whose metrics are at `url`; None where it does not answer within so many seconds."""
    body = await fetch(url, seconds, _MAX_BYTES)
    return None if body is None else _read(body)


def _read(metrics: bytes) -> Reported | None:
    cache, model = (labels(pattern.search(metrics)) for pattern in (_CACHE, _MODEL))
    blocks = number(cache.get("num_gpu_blocks", ""))
    if blocks is None:
        return None
    dtype = model.get("kv_cache_dtype") or cache.get("cache_dtype", "")
    return Reported(blocks, _words(dtype), _words(model.get("weights", "")))


def labels(line: re.Match[bytes] | None) -> dict[str, str]:
    """The labels of a metric, which the match's first group holds."""
    pairs = _LABEL.findall(line[1]) if line else ()
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}


def number(value: str) -> int | None:
    """What a label says in digits, if it does."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else None


def _words(value: str) -> str:
    return value if _WORDS.fullmatch(value) else ""


@dataclass
class _Request:
    """What is known of a workload's engine: of which pod, its answer, and when the next request may go."""

    pod: str
    reported: Reported | None = None
    is_pending: bool = False
    retry_at: float = 0.0


class EngineFacts:
    """What endpoints' engines report, requested in the background.

    Args:
        told: called with the endpoint whose engine has answered; in a thread of ours.
        clock: seconds that never go back.
    """

    def __init__(self, on_reported: Callable[[Key], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_reported = on_reported
        self._clock = clock
        self._requests: dict[Key, dict[str, _Request]] = {}
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("engine-facts")
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    def reported(self, key: Key, workload: str, pod: str, url: str) -> Reported | None:
        """What the engine of a pod of the endpoint's workload reports, whose metrics are at `url`; None: nothing is
        known, or not yet. Never waits."""
        with self._lock:
            workloads = self._requests.setdefault(key, {})
            request = workloads.get(workload)
            if request is None or request.pod != pod:
                request = workloads[workload] = _Request(pod)
            if request.reported is None and not request.is_pending and self._clock() >= request.retry_at:
                request.is_pending = True
                self._loop.run(self._ask(key, request, url))
            return request.reported

    def forget(self, key: Key) -> None:
        """There is no such endpoint any more."""
        with self._lock:
            self._requests.pop(key, None)

    async def _ask(self, key: Key, request: _Request, url: str) -> None:
        async with self._slots:
            reported = await ask(url, _TIMEOUT_SECONDS)
        with self._lock:
            request.reported, request.is_pending, request.retry_at = reported, False, self._clock() + _PAUSE_SECONDS
        if reported is not None:
            self._on_reported(key)
