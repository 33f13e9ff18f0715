"""The access log of completed requests, by which Envoy reports to the picker how each routed request ended."""

from __future__ import annotations

from typing import Final

from stoker_gateway.envoy.values import Config
from stoker_gateway.protocol.envoy_headers import METADATA, PICK

#: Entries are sent after this time in seconds, or once the buffer has this size in bytes.
FLUSH_S: Final = 0.05
BUFFER_BYTES: Final = 16384
#: Envoy's statistic: number of entries that it has not dropped, including buffered ones.
LOGS_WRITTEN_STAT: Final = "access_logs.grpc_access_log.logs_written"
#: Response headers in an entry.
HEADERS: Final = ("content-type", "content-encoding")

_TYPE: Final = "type.googleapis.com/envoy.extensions."


def config(cluster: str) -> Config:
    """Return the configuration of this access log, which Envoy sends to a cluster."""
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
