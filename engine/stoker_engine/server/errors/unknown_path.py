"""Error message for a path that does not exist. It names the path that was probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.routing import Match

from stoker_engine.server.paths import ADMIN_PATHS, route_path

_PREFIX: Final = "/v1"
#: Maximum number of characters of a path in the message.
_MAX_SHOWN: Final = 200


def unknown_path(scope: Mapping[str, Any]) -> str:
    """Return the message for a request that no route of its application handles."""
    path = route_path(scope)
    if path in ADMIN_PATHS:
        return (
            "loading adapters at runtime is disabled; start the server with --enable-lora and "
            "--allow-runtime-lora-updating"
        )
    for candidate, remedy in _candidates(path):
        if _is_served(scope, candidate):
            return f"there is no such path; use {scope.get('root_path', '')}{candidate[:_MAX_SHOWN]}{remedy}"
    listed = "" if scope["app"].openapi_url is None else "; GET /openapi.json lists them"
    return f"there is no such path{listed}"


def _candidates(path: str) -> Iterator[tuple[str, str]]:
    """Yield similar paths, with the remedy if the client's base URL causes the mistake."""
    without_slash = path.rstrip("/")
    yield without_slash, ""
    yield f"{_PREFIX}{without_slash}", f": the client's base URL lacks {_PREFIX}"
    if without_slash.startswith(f"{_PREFIX}{_PREFIX}/"):
        yield (
            without_slash.removeprefix(_PREFIX),
            f": the client adds {_PREFIX} to a base URL that already ends with it",
        )


def _is_served(scope: Mapping[str, Any], path: str) -> bool:
    """Return whether a route handles `path`, which is without a proxy's prefix, with any method."""
    asked = {**scope, "path": path, "root_path": ""}
    return any(route.matches(asked)[0] is not Match.NONE for route in scope["app"].routes)
