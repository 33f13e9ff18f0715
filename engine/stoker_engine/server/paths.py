"""Request paths as routes see them, and the paths with special access rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

#: Paths that need no API key and are answered while the server stops.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/live", "/ping", "/version", "/metrics", "/copies"})

#: Paths that need an admin key; see `middleware.admin_keys`.
ADMIN_PATHS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def route_path(scope: Mapping[str, Any]) -> str:
    """Return a request's path without a proxy's prefix (``--root-path``), according to starlette's rule."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and (path == prefix or path.startswith(f"{prefix}/")) else path


class RootPathMiddleware:
    """Sets ``root_path`` for all later middleware and routes. Proxies may strip the prefix or keep it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)
