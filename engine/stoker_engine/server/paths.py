"""Paths as routes know them, and those that machines ask all the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

#: Answered without an API key, and while the server stops.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/live", "/ping", "/version", "/metrics", "/copies"})

#: Opened by keys of their own: `middleware.admin_keys`.
ADMIN_PATHS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def route_path(scope: Mapping[str, Any]) -> str:
    """The path without the prefix of a proxy (``--root-path``), by starlette's rule."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and (path == prefix or path.startswith(f"{prefix}/")) else path


class RootPathMiddleware:
    """Gives all that comes after it the proxy's prefix. Proxies that strip it and proxies that do not both work."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)
