"""Reads from running engines what the planner only estimates: KV-cache blocks, formats of weights and KV cache.

One pod of a workload is queried until it answers. The number of KV-cache blocks is in vLLM's metric
``vllm:cache_config_info``, which Stoker's engine also has. The formats are in ``stoker:model_info``, which only
Stoker's engine has; vLLM's ``vllm:cache_config_info`` also has the cache's dtype. If an engine cannot be reached, for
example because a NetworkPolicy forbids it, only these facts are missing.

A tenant chooses the image, so the answer is not trusted. Requests run in a background event loop, a limited number at a
time, and reconciles do not wait for them. Each request has limits of received bytes and total time; redirects are not
followed, and answers are not decompressed.
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
#: Pattern of a format's name; other values are ignored.
_WORDS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _,:.()×-]{0,255}")
#: Maximum size of a response in bytes; the metrics of many data-parallel engines take several hundred KB.
_MAX_BYTES: Final = 2 << 20
#: Maximum number of digits of a numeric label.
_MAX_DIGITS: Final = 12
_TIMEOUT_SECONDS: Final = 2.0
_MAX_CONCURRENT_REQUESTS: Final = 16
#: Minimum pause between two requests to a pod, in seconds.
_PAUSE_SECONDS: Final = 2.0


def metrics_url(container: Mapping[str, Any], address: str) -> str:
    """Return the URL of an engine's metrics, with the scheme of its HTTP readiness probe (default: http).

    Args:
        container: the engine's container in a pod.
        address: IP address of the pod.
    """
    probe = container.get("readinessProbe", {}).get("httpGet", {})
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    host = f"[{address}]" if ":" in address else address
    return f"{probe.get('scheme', 'HTTP').lower()}://{host}:{port}/metrics"


async def ask(url: str, seconds: float) -> Reported | None:
    """Return the facts of the first engine in the metrics at `url`, or None without a valid answer within `seconds`."""
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
    """Return the labels in the match's first group; none without a match."""
    pairs = _LABEL.findall(line[1]) if line else ()
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}


def number(value: str) -> int | None:
    """Return a label's value as an integer, or None if it is not 1 to 12 digits."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else None


def _words(value: str) -> str:
    return value if _WORDS.fullmatch(value) else ""


@dataclass
class _Request:
    """The requests to a workload's pod: its answer, and the earliest time of the next request."""

    pod: str
    reported: Reported | None = None
    is_pending: bool = False
    retry_at: float = 0.0


class EngineFacts:
    """The facts that endpoints' engines report, requested in the background.

    Args:
        on_reported: called in the background thread with each endpoint whose engine has reported facts.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, on_reported: Callable[[Key], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_reported = on_reported
        self._clock = clock
        self._requests: dict[Key, dict[str, _Request]] = {}
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("engine-facts")
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    def reported(self, key: Key, workload: str, pod: str, url: str) -> Reported | None:
        """Return the facts of a pod's engine. While there are none, return None and request them in the background.

        Args:
            key: the endpoint.
            workload: name of the workload.
            pod: name of the pod.
            url: URL of the pod's metrics.
        """
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
        """Remove an endpoint."""
        with self._lock:
            self._requests.pop(key, None)

    async def _ask(self, key: Key, request: _Request, url: str) -> None:
        async with self._slots:
            reported = await ask(url, _TIMEOUT_SECONDS)
        with self._lock:
            request.reported, request.is_pending, request.retry_at = reported, False, self._clock() + _PAUSE_SECONDS
        if reported is not None:
            self._on_reported(key)
