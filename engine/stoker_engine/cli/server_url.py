"""The server's URL in a command line, which may be given with or without ``/v1``."""

from __future__ import annotations

from stoker_common.errors import ArgumentError


def api_url(flag: str, url: str) -> str:
    """Return the base URL of an OpenAI-compatible API. A URL without a path gets ``/v1``; other URLs only lose slashes
    at the end.

    Raises:
        ArgumentError: it is not an HTTP URL.
    """
    checked = _checked(flag, url)
    return checked if "/" in checked.partition("://")[2] else f"{checked}/v1"


def root_url(flag: str, url: str) -> str:
    """Return the server's URL without ``/v1`` and slashes at the end.

    Raises:
        ArgumentError: it is not an HTTP URL.
    """
    return _checked(flag, url).removesuffix("/v1").rstrip("/")


def _checked(flag: str, url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ArgumentError(flag, f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ArgumentError(flag, f"{url!r} is not a URL such as http://localhost:8000")
    return url.rstrip("/")
