"""The access log: a JSON line on standard output for each request, at its end, without prompts and credentials."""

from __future__ import annotations

from typing import Final

from stoker_gateway.envoy.values import Config

#: Namespace and key of the model's name in a cluster's metadata.
METADATA: Final = "stoker"
MODEL: Final = "model"

#: Field → Envoy's format string. The first fields are those of all logs (`stoker_common.logs`); `timestamp` is the
#: request's start. Durations are in milliseconds. Unknown values are null, such as the model and the server of a
#: request that the picker rejected.
FIELDS: Final = {
    "timestamp": "%START_TIME(%Y-%m-%dT%H:%M:%S.%3fZ)%",
    "level": "info",
    "logger": "envoy.access",
    "message": "%REQ(:METHOD)% %PATH(NQ)% %RESPONSE_CODE%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "model": f"%METADATA(CLUSTER:{METADATA}:{MODEL})%",
    "status": "%RESPONSE_CODE%",
    "server": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "duration_ms": "%DURATION%",
    "ttfb_ms": "%RESPONSE_DURATION%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "flags": "%RESPONSE_FLAGS%",
}


def config() -> Config:
    """Return the configuration of this access log."""
    kind = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    return {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {"@type": kind, "log_format": {"json_format": FIELDS}},
    }
