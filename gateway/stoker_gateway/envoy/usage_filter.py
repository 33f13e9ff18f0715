"""Filter that copies the token usage in responses to dynamic metadata while they stream through Envoy, without
delaying or changing them.

It is a Lua script because Envoy's own filters (1.40) are not usable: the JSON filter buffers whole responses and turns
a response that exceeds its buffer into an error; the SSE filter crashes Envoy if an event is a number, such as
``data: 1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stoker_gateway.envoy.values import Config

_SCRIPT: Final = Path(__file__).with_name("usage.lua")


def config() -> Config:
    """Return the filter's configuration."""
    return {
        "name": "usage",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": _SCRIPT.read_text(encoding="utf-8")},
        },
    }
