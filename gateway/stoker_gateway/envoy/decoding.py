"""Decompression of gzip request bodies in Envoy, so that the picker and the servers get decompressed bodies.

``max_body_bytes`` limits the decompressed body. The picker rejects bodies with another encoding.
"""

from __future__ import annotations

from stoker_gateway.envoy.values import Config

_TYPE = "type.googleapis.com/envoy.extensions."


def gzip() -> Config:
    """Return the filter's configuration."""
    return {
        "name": "gzip",
        "typed_config": {
            "@type": f"{_TYPE}filters.http.decompressor.v3.Decompressor",
            "decompressor_library": {
                "name": "gzip",
                "typed_config": {
                    "@type": f"{_TYPE}compression.gzip.decompressor.v3.Gzip",
                    "window_bits": 15,
                    "chunk_size": 65536,
                },
            },
            "request_direction_config": {"advertise_accept_encoding": False},
            "response_direction_config": {
                "common_config": {"enabled": {"default_value": False, "runtime_key": "gateway.decode_answers"}}
            },
        },
    }
