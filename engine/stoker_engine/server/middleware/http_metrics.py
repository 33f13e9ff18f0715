"""HTTP metrics, with the names and labels of prometheus-fastapi-instrumentator, which vLLM uses."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_engine.server.paths import OPEN_PATHS, route_path

#: Paths without metrics, because they are polled all the time.
_EXCLUDED = OPEN_PATHS | {"/load"}
# fmt: off
_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
# fmt: on
_SECONDS_COARSE = (0.1, 0.5, 1)
#: Methods with a label value of their own. Others share one, because clients may invent any number of methods.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class HTTPMetricsMiddleware:
    """Records requests when they have ended."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self._request_size = Summary(
            "http_request_size_bytes", "Request body size, by Content-Length.", ["handler"], registry=registry
        )
        self._response_size = Summary(
            "http_response_size_bytes", "Response body size, by Content-Length.", ["handler"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_highr_seconds",
            "Duration of requests, fine buckets.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._seconds_by_handler = Histogram(
            "http_request_duration_seconds",
            "Duration of requests, coarse buckets.",
            ["method", "handler"],
            buckets=_SECONDS_COARSE,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or route_path(scope) in _EXCLUDED:
            await self._app(scope, receive, send)
            return
        status, response_size = 500, 0
        began = time.perf_counter()

        async def send_seen(message: Message) -> None:
            nonlocal status, response_size
            if message["type"] == "http.response.start":
                status = message["status"]
                response_size = _length(Headers(raw=message["headers"]))
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            seconds = time.perf_counter() - began
            method = scope["method"] if scope["method"] in _METHODS else "other"
            handler = getattr(scope.get("route"), "path", "none")
            self._requests.labels(method, f"{status // 100}xx", handler).inc()
            self._request_size.labels(handler).observe(_length(Headers(scope=scope)))
            self._response_size.labels(handler).observe(response_size)
            self._seconds.observe(seconds)
            self._seconds_by_handler.labels(method, handler).observe(seconds)


def _length(headers: Headers) -> int:
    declared = headers.get("content-length", "0")
    return int(declared[:20]) if declared.isdecimal() else 0
