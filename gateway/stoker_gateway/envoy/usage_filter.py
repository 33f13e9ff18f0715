"""What an answer says of its tokens, read by Envoy on the way, into dynamic metadata. No answer waits for it, is in
memory for it, or ends otherwise for what is in it.

A script does it, not Envoy's own filters (1.40): that for JSON holds whole answers, and makes an error of one that is
larger than its buffer; that for events ends Envoy at an event that is a number, as ``data: 1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stoker_gateway.envoy.values import Config

_SCRIPT: Final = Path(__file__).with_name("usage.lua")


def config() -> Config:
    """The filter."""
    return {
        "name": "usage",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": _SCRIPT.read_text(encoding="utf-8")},
        },
    }
