"""The log of ended requests: Envoy reports to the picker how each request ended that it routed."""

from __future__ import annotations

from typing import Final

from stoker_gateway.envoy.values import Config
from stoker_gateway.protocol.envoy_headers import METADATA, PICK

#: The longest that an entry waits for others, and bytes of entries that are sent together.
FLUSH_S: Final = 0.05
BUFFER_BYTES: Final = 16384
#: The statistic in which Envoy counts entries, those included that wait to be sent.
LOGS_WRITTEN_STAT: Final = "access_logs.grpc_access_log.logs_written"
#: Response headers that an entry has.
HEADERS: Final = ("content-type", "content-encoding")

_TYPE: Final = "type.googleapis.com/envoy.extensions."


def config(cluster: str) -> Config:
    """Envoy's access log of these, sent to a cluster."""
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {
            "metadata_filter": {
                "matcher": {"filter": METADATA, "path": [{"key": PICK}], "value": {"present_match": True}},
                "match_if_key_not_found": False,
            }
        },
        "typed_config": {
            "@type": f"{_TYPE}access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "ended",
                "grpc_service": {"envoy_grpc": {"cluster_name": cluster}},
                "transport_api_version": "V3",
                "buffer_flush_interval": f"{FLUSH_S:g}s",
                "buffer_size_bytes": BUFFER_BYTES,
            },
            "additional_response_headers_to_log": list(HEADERS),
        },
    }
