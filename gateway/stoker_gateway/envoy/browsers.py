"""What browsers ask before a page of another origin may use the gateway (CORS): Envoy answers it by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stoker_gateway.envoy.values import Config
from stoker_gateway.limits import ratelimit_headers
from stoker_gateway.protocol.envoy_headers import HELD_HEADER

#: The filter's name, in the list of filters and of what is said of hosts.
NAME: Final = "cors"
#: Headers of answers that pages may read.
_EXPOSED: Final = (
    *("x-request-id", "request-id", "retry-after", "x-should-retry", HELD_HEADER),
    *ratelimit_headers.HEADERS,
)
_METHODS: Final = "GET, POST, DELETE, OPTIONS"
#: For how many seconds a browser need not ask again.
_MAX_AGE_S: Final = 600
_TYPE: Final = "type.googleapis.com/envoy.extensions.filters.http.cors.v3."


def filter_config() -> Config:
    """The filter."""
    return {"name": NAME, "typed_config": {"@type": f"{_TYPE}Cors"}}


def policy(origins: Iterable[str]) -> Config:
    """Which pages may use the gateway.

    Args:
        origins: as browsers say them; ``*``: any. Credentials are in headers that pages set themselves, not in cookies.
    """
    matches = [{"safe_regex": {"regex": ".*"}} if origin == "*" else {"exact": origin} for origin in origins]
    return {
        "@type": f"{_TYPE}CorsPolicy",
        "allow_origin_string_match": matches,
        "allow_methods": _METHODS,
        "allow_headers": "*, authorization",
        "expose_headers": ", ".join(_EXPOSED),
        "max_age": str(_MAX_AGE_S),
    }
