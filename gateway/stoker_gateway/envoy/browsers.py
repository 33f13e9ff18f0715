"""CORS: Envoy answers browsers' preflight requests and adds the CORS headers to responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stoker_gateway.envoy.values import Config
from stoker_gateway.limits import ratelimit_headers
from stoker_gateway.protocol.envoy_headers import HELD_HEADER

#: Name of the filter, in the list of filters and in the virtual host's configuration.
NAME: Final = "cors"
#: Response headers that CORS exposes to pages.
_EXPOSED: Final = (
    *("x-request-id", "request-id", "retry-after", "x-should-retry", HELD_HEADER),
    *ratelimit_headers.HEADERS,
)
_METHODS: Final = "GET, POST, DELETE, OPTIONS"
#: Seconds for which a browser may cache a preflight response.
_MAX_AGE_S: Final = 600
_TYPE: Final = "type.googleapis.com/envoy.extensions.filters.http.cors.v3."


def filter_config() -> Config:
    """Return the filter's configuration."""
    return {"name": NAME, "typed_config": {"@type": f"{_TYPE}Cors"}}


def policy(origins: Iterable[str]) -> Config:
    """Return the CORS policy. It does not allow cookies, because pages send the key in a header.

    Args:
        origins: allowed origins, as browsers send them; ``*`` means any.
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
