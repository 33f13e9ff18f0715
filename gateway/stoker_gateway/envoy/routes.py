"""Envoy's routes: the paths of requests that go to the picker and then to the cluster that it chooses, and the paths
that Envoy answers itself."""

from __future__ import annotations

import json
from importlib.metadata import version

from stoker_gateway.envoy import browsers
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.envoy.values import LISTENER, TYPE, Config, seconds
from stoker_gateway.limits import ratelimit_headers
from stoker_gateway.protocol import paths
from stoker_gateway.protocol.envoy_headers import CLUSTER, HELD_HEADER, METADATA, NOT_BEGUN_HEADER, USAGE_HEADER


def route_config(settings: EnvoySettings) -> Config:
    """Return the route configuration.

    Only requests with allowed paths go to the picker, which chooses the cluster. Without its decision a request is
    rejected, or goes to the cluster of `fail_open`.
    """
    without_picker = {
        "typed_per_filter_config": {
            "picker": {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
        }
    }
    version_reply = {"status": 200, "body": {"inline_string": json.dumps({"version": version("stoker")})}}
    is_json = {
        "header": {"key": "content-type", "value": "application/json"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    routes: list[Config] = [
        {"name": "health", "match": {"path": "/health"}, "direct_response": {"status": 200}, **without_picker},
        {"name": "ping", "match": {"path": "/ping"}, "direct_response": {"status": 200}, **without_picker},
        {
            "name": "version",
            "match": {"path": "/version"},
            "direct_response": version_reply,
            "response_headers_to_add": [is_json],
            **without_picker,
        },
    ]
    headers = (*ratelimit_headers.HEADERS, HELD_HEADER)
    limits = {"response_headers_to_add": [_picker_header(name) for name in headers]}
    for match in _allowed():
        if settings.fail_open is None:
            routes.append({"name": "picked", "match": match, "route": _to_server(settings), **limits})
            continue
        answered = {**match, "headers": [{"name": CLUSTER, "present_match": True}]}
        routes.append({"name": "picked", "match": answered, "route": _to_server(settings), **limits})
        anywhere = {**_to_server(settings), "cluster": settings.fail_open}
        del anywhere["cluster_header"]
        routes.append({"name": "fail-open", "match": match, "route": anywhere})
    routes.append({"name": "none", "match": {"prefix": "/"}, "direct_response": {"status": 404}, **without_picker})
    host: Config = {"name": LISTENER, "domains": ["*"], "routes": routes}
    host["request_body_buffer_limit"] = settings.max_body_bytes
    host["request_headers_to_add"] = [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        # Envoy reads the token usage from the response, so it must not be compressed.
        for key, value in ((USAGE_HEADER, "1"), ("accept-encoding", "identity"))
    ]
    if settings.allowed_origins:
        host["typed_per_filter_config"] = {browsers.NAME: browsers.policy(settings.allowed_origins)}
    host["response_headers_to_remove"] = [NOT_BEGUN_HEADER]
    host["request_headers_to_remove"] = [
        "x-envoy-external-address",
        "x-envoy-internal",
    ]  # Envoy adds them to each request
    # Clusters are loaded after the routes.
    return {"name": LISTENER, "virtual_hosts": [host], "validate_clusters": False}


def _allowed() -> list[Config]:
    """Return the route matches of the paths that Envoy sends to the picker."""
    exact = [paths.MODELS, paths.SCHEMA, *sorted(paths.POSTED)]
    return [{"path": path} for path in exact] + [{"prefix": f"{path}/"} for path in (paths.MODELS, paths.RESPONSES)]


def _picker_header(header: str) -> Config:
    """Return a response header with the value from the picker's metadata. Envoy omits the header if there is no
    value."""
    value = f"%DYNAMIC_METADATA({METADATA}:{header})%"
    return {"header": {"key": header, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _to_server(settings: EnvoySettings) -> Config:
    return {
        "cluster_header": CLUSTER,
        "timeout": "0s",
        "idle_timeout": seconds(settings.idle_s + settings.max_held_s),
        "cluster_not_found_response_code": "SERVICE_UNAVAILABLE",
        # Retry if no byte of a response has arrived (Envoy never retries later), or if the response reports that the
        # server has not started the request.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
            # Other error responses are not retried, because a request that crashed a server must not crash the next
            # one.
            "retriable_headers": [{"name": NOT_BEGUN_HEADER, "present_match": True}],
            "num_retries": 1,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.010s"},
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": f"{TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
                }
            ],
            "host_selection_retry_max_attempts": 3,
        },
    }
