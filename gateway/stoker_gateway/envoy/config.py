"""Envoy's configuration, as plain values: what does not change (`bootstrap`), and files that it watches (`clusters`,
`servers`).

    client ─► what is internal is stripped ─► the path is allowed ─► the picker names cluster and servers ─► router

A request without a cluster of the picker's, or with a server that is not of that cluster, is answered 503. Nothing is
ever sent where the picker did not say, unless the settings say `fail_open`: then Envoy itself chooses among the servers
of that one cluster while the picker fails.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final

from stoker_gateway.envoy import access_log_lines, browsers, decoding, ended_log, local_replies, usage_filter
from stoker_gateway.envoy.settings import EnvoySettings, TLSFiles
from stoker_gateway.limits import ratelimit_headers
from stoker_gateway.protocol import paths
from stoker_gateway.protocol.envoy_headers import (
    CLUSTER,
    DESTINATION,
    DESTINATION_METADATA,
    METADATA,
    NOT_BEGUN_HEADER,
    SUBSET_METADATA,
    USAGE_HEADER,
)
from stoker_gateway.registry.addresses import EVERY
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry

Config = dict[str, Any]

#: What clients must not say, since the picker, Envoy or servers would believe it.
INTERNAL_HEADERS: Final = ("x-stoker-", "x-gateway-", "x-envoy-")

#: As its metrics call it.
LISTENER: Final = "gateway"
PICKER: Final = "picker"
#: As Envoy calls its own.
CERTIFICATE: Final = "gateway"

_TYPE: Final = "type.googleapis.com/envoy."
#: Servers close idle connections too (ours after 75 s, uvicorn after 5): Envoy must be first, since a request that
#: meets a close costs a retry.
_UPSTREAM_IDLE_S: Final = 4
_CONNECT_TIMEOUT_S: Final = 2
#: What is on its way to a client that does not read. Bodies of requests have a limit of their own.
_CONNECTION_BUFFER_BYTES: Final = 1 << 20
#: No limit of Envoy's own: how much a server gets is the picker's to say.
_UNLIMITED: Final = 1 << 30


def bootstrap(settings: EnvoySettings) -> Config:
    """What Envoy is started with."""
    return {
        "node": {"id": "stoker-gateway", "cluster": "stoker-gateway"},
        "admin": {"address": _pipe(settings.admin_socket)},
        "dynamic_resources": {
            "cds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": str(settings.clusters_file)},
            }
        },
        "static_resources": {"listeners": [_listener(settings)], "clusters": [_picker_cluster(settings)]},
        "stats_config": {"stats_matcher": {"inclusion_list": {"patterns": _statistics()}}},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPE}extensions.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": settings.max_connections,
                    },
                }
            ]
        },
    }


def clusters(model_registry: ModelRegistry, settings: EnvoySettings) -> Config:
    """The clusters' file: one for each endpoint."""
    return _resources(_cluster(endpoint, settings) for endpoint in model_registry.endpoints.values())


def servers(endpoint: Endpoint) -> Config:
    """The file of a cluster's servers.

    Raises:
        ValueError: an address is not ``IP:PORT``.
    """
    return _resources(
        [
            {
                "@type": f"{_TYPE}config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": endpoint.cluster,
                "endpoints": [
                    {"lb_endpoints": [{"endpoint": {"address": _address(server)}} for server in endpoint.servers]}
                ],
            }
        ]
    )


def _resources(resources: Iterable[Config]) -> Config:
    return {"resources": list(resources)}


def _address(server: str) -> Config:
    host, colon, port = server.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"{server!r} is not IP:PORT")
    return _socket_address(str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port))


def _listening_address(host: str, port: int) -> Config:
    address = _socket_address(host, port)
    if host == EVERY:
        address["socket_address"]["ipv4_compat"] = True
    return address


def _socket_address(host: str, port: int) -> Config:
    return {"socket_address": {"address": host, "port_value": port}}


def _pipe(path: object) -> Config:
    return {"pipe": {"path": str(path)}}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"


def _cluster(endpoint: Endpoint, settings: EnvoySettings) -> Config:
    return {
        "@type": f"{_TYPE}config.cluster.v3.Cluster",
        "name": endpoint.cluster,
        "metadata": {"filter_metadata": {access_log_lines.METADATA: {access_log_lines.MODEL: endpoint.name}}},
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": str(settings.servers_file(endpoint.cluster))},
            }
        },
        "connect_timeout": _seconds(_CONNECT_TIMEOUT_S),
        "load_balancing_policy": {"policies": [{"typed_extension_config": _picked_server(settings)}]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": _UNLIMITED,
                    "max_pending_requests": _UNLIMITED,
                    "max_requests": _UNLIMITED,
                    # All that a server of two had when it died comes at once. No request is repeated twice.
                    "retry_budget": {"budget_percent": {"value": 50}, "min_retry_concurrency": 100},
                }
            ]
        },
        # No outlier detection: a policy that obeys the picker sends to ejected servers too (tested). The picker ejects.
        # A connection that died without a word is found out by a request. A client has its own, one for each request at
        # once, so that the retry does not meet the next dead one.
        "connection_pool_per_downstream_connection": True,
        "upstream_connection_options": {
            # A machine that vanished does not say so.
            "tcp_keepalive": {"keepalive_time": 15, "keepalive_interval": 5, "keepalive_probes": 3}
        },
        "typed_extension_protocol_options": _protocol(
            {
                "common_http_protocol_options": {"idle_timeout": _seconds(_UPSTREAM_IDLE_S)},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        ),
    }


def _protocol(options: Config) -> Config:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {f"envoy.{kind}": {"@type": f"{_TYPE}{kind}", **options}}


def _picked_server(settings: EnvoySettings) -> Config:
    """The server that the picker named; at the retry its next one. Where it named none that is here: none, or any."""
    return {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [
                {"header": DESTINATION},
                {"metadata": {"key": DESTINATION_METADATA, "path": [{"key": DESTINATION}]}},
            ],
            "fallback_policy": {
                "policies": [{"typed_extension_config": _any_server() if settings.fail_open else _no_server()}]
            },
        },
    }


def _any_server() -> Config:
    """A policy that finds the server with the fewest requests of two."""
    return {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {
            "@type": f"{_TYPE}extensions.load_balancing_policies.least_request.v3.LeastRequest",
            "choice_count": {"value": 2},
        },
    }


def _no_server() -> Config:
    """A policy that never finds a server: it looks for a label that none has."""
    kind = f"{_TYPE}extensions.load_balancing_policies"
    return {
        "name": "envoy.load_balancing_policies.subset",
        "typed_config": {
            "@type": f"{kind}.subset.v3.Subset",
            "fallback_policy": "NO_FALLBACK",
            "subset_selectors": [{"keys": ["none"], "fallback_policy": "NO_FALLBACK"}],
            "subset_lb_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.round_robin",
                            "typed_config": {"@type": f"{kind}.round_robin.v3.RoundRobin"},
                        }
                    }
                ]
            },
        },
    }


def _picker_cluster(settings: EnvoySettings) -> Config:
    return {
        "name": PICKER,
        "type": "STATIC",
        "connect_timeout": _seconds(_CONNECT_TIMEOUT_S),
        "load_assignment": {
            "cluster_name": PICKER,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _pipe(settings.picker_socket)}}]}],
        },
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": _UNLIMITED, "max_pending_requests": _UNLIMITED, "max_requests": _UNLIMITED}
            ]
        },
        # Without `fail_open` only ``/ready`` goes by it: requests are sent to the picker as long as it is reached.
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0 if settings.fail_open else 100}},
        "typed_extension_protocol_options": _protocol({"explicit_http_config": {"http2_protocol_options": {}}}),
    }


def _listener(settings: EnvoySettings) -> Config:
    return {
        "name": LISTENER,
        "address": _listening_address(settings.host, settings.port),
        "per_connection_buffer_limit_bytes": _CONNECTION_BUFFER_BYTES,
        "filter_chains": [
            {**_transport(settings), "filters": [{"name": "http", "typed_config": _connections(settings)}]}
        ],
    }


def _transport(settings: EnvoySettings) -> Config:
    if settings.tls is None:
        return {}
    path = {"path_config_source": {"path": str(settings.certificate_file)}, "resource_api_version": "V3"}
    context = {
        "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificate_sds_secret_configs": [{"name": CERTIFICATE, "sds_config": path}],
        },
    }
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context}}


def certificate(tls: TLSFiles) -> Config:
    """The file that says where the certificate is. Envoy reads it again when the files' folder gets others: Kubernetes
    replaces all files of a Secret at once, by a link.
    """
    return _resources(
        [
            {
                "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.Secret",
                "name": CERTIFICATE,
                "tls_certificate": {
                    "certificate_chain": {"filename": str(tls.certificate)},
                    "private_key": {"filename": str(tls.key)},
                    "watched_directory": {"path": str(tls.certificate.parent)},
                },
            }
        ]
    )


def _connections(settings: EnvoySettings) -> Config:
    """How clients' connections are read: strictly."""
    return {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": LISTENER,
        "codec_type": "AUTO",
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {
                    "@type": f"{_TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                    "mutations": _without_internal_headers(),
                },
            }
        ],
        "normalize_path": True,
        "merge_slashes": True,
        # Clients write slashes in models' names so. It comes first: what is allowed is judged by what is sent on.
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "use_remote_address": True,
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        "common_http_protocol_options": {
            "max_headers_count": 100,
            "headers_with_underscores_action": "DROP_HEADER",  # some servers read X_Stoker_Y as X-Stoker-Y
        },
        "max_request_headers_kb": 32,
        "request_headers_timeout": _seconds(settings.headers_s),
        "request_timeout": _seconds(settings.upload_s),
        "stream_idle_timeout": _seconds(settings.idle_s),
        # Proxies such as nginx speak it by default; whom they speak to they always say.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": LISTENER},
        "http2_protocol_options": {"max_concurrent_streams": 2048},
        "local_reply_config": local_replies.config(),
        "access_log": [ended_log.config(PICKER), *([access_log_lines.config()] if settings.access_log else [])],
        "route_config": _routes(settings),
        "http_filters": _filters(settings),
    }


def _without_internal_headers() -> list[Config]:
    return [
        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}} for prefix in INTERNAL_HEADERS
    ]


def _filters(settings: EnvoySettings) -> list[Config]:
    filters = "extensions.filters.http"
    return [
        *([browsers.filter_config()] if settings.allowed_origins else []),
        {
            "name": "ready",
            "typed_config": {
                "@type": f"{_TYPE}{filters}.health_check.v3.HealthCheck",
                "pass_through_mode": False,
                "headers": [{"name": ":path", "string_match": {"exact": "/ready"}}],
                "cluster_min_healthy_percentages": {PICKER: {"value": 100}},
            },
        },
        decoding.gzip(),
        {
            "name": "picker",
            "typed_config": {
                "@type": f"{_TYPE}{filters}.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
                # Where the picker fails, Envoy goes on: a request without a decision finds no cluster, and an answer
                # that is under way goes on even if the picker dies before the end of its stream is read.
                "failure_mode_allow": True,
                "message_timeout": _seconds(settings.hold_s + 5),
                "processing_mode": {
                    "request_header_mode": "SEND",
                    "request_body_mode": "BUFFERED",
                    "request_trailer_mode": "SKIP",
                    "response_header_mode": "SKIP",
                    "response_body_mode": "NONE",
                    "response_trailer_mode": "SKIP",
                },
                "metadata_options": {
                    "receiving_namespaces": {"untyped": [DESTINATION_METADATA, METADATA]},
                    "forwarding_namespaces": {"untyped": [SUBSET_METADATA]},
                },
            },
        },
        usage_filter.config(),
        {
            "name": "router",
            "typed_config": {"@type": f"{_TYPE}{filters}.router.v3.Router", "suppress_envoy_headers": True},
        },
    ]


def _routes(settings: EnvoySettings) -> Config:
    """Allowed paths go to the picker, which names the cluster; others do not, and without a cluster none is found but
    the one of `fail_open`.
    """
    without_picker = {
        "typed_per_filter_config": {
            "picker": {"@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
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
    limits = {"response_headers_to_add": [_as_the_picker_said(name) for name in ratelimit_headers.HEADERS]}
    for match in _allowed():
        if settings.fail_open is None:
            routes.append({"name": "asked", "match": match, "route": _to_server(settings), **limits})
            continue
        answered = {**match, "headers": [{"name": CLUSTER, "present_match": True}]}
        routes.append({"name": "asked", "match": answered, "route": _to_server(settings), **limits})
        anywhere = {**_to_server(settings), "cluster": settings.fail_open}
        del anywhere["cluster_header"]
        routes.append({"name": "unanswered", "match": match, "route": anywhere})
    routes.append({"name": "none", "match": {"prefix": "/"}, "direct_response": {"status": 404}, **without_picker})
    host: Config = {"name": LISTENER, "domains": ["*"], "routes": routes}
    host["request_body_buffer_limit"] = settings.max_body_bytes
    host["request_headers_to_add"] = [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        # What an answer used is read as it passes, so it must not be compressed.
        for key, value in ((USAGE_HEADER, "1"), ("accept-encoding", "identity"))
    ]
    if settings.allowed_origins:
        host["typed_per_filter_config"] = {browsers.NAME: browsers.policy(settings.allowed_origins)}
    host["response_headers_to_remove"] = [NOT_BEGUN_HEADER]
    host["request_headers_to_remove"] = ["x-envoy-external-address", "x-envoy-internal"]  # Envoy's own, of each request
    # Clusters come later than routes.
    return {"name": LISTENER, "virtual_hosts": [host], "validate_clusters": False}


def _allowed() -> list[Config]:
    """Of the servers' paths, those that clients reach."""
    exact = [paths.MODELS, paths.SCHEMA, *sorted(paths.POSTED)]
    return [{"path": path} for path in exact] + [{"prefix": f"{path}/"} for path in (paths.MODELS, paths.RESPONSES)]


def _as_the_picker_said(header: str) -> Config:
    """A header of the answer, unless the picker said nothing of it: then its value is empty, and it is left out."""
    value = f"%DYNAMIC_METADATA({METADATA}:{header})%"
    return {"header": {"key": header, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _to_server(settings: EnvoySettings) -> Config:
    return {
        "cluster_header": CLUSTER,
        "timeout": "0s",
        "idle_timeout": _seconds(settings.idle_s),
        "cluster_not_found_response_code": "SERVICE_UNAVAILABLE",
        # Only while no byte of an answer came (then Envoy itself no longer repeats), or where nothing was started.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
            # An answer says so itself: a request that a server died of must not be brought to the next one.
            "retriable_headers": [{"name": NOT_BEGUN_HEADER, "present_match": True}],
            "num_retries": 1,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.010s"},
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": f"{_TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
                }
            ],
            "host_selection_retry_max_attempts": 3,
        },
    }


def _statistics() -> list[Config]:
    """Of Envoy's hundreds of numbers for each cluster, those that say something here."""
    patterns = (
        r"server\.(live|state|uptime|memory_allocated|total_connections|concurrency)",
        r"listener_manager\.(workers_started|total_listeners_active)",
        r"listener\..*\.(downstream_cx_active|downstream_cx_total|downstream_global_cx_overflow)",
        rf"http\.{LISTENER}\.(downstream_(cx|rq)_.*|ext_proc\..*|no_route|.*_timeout)",
        r"access_logs\.grpc_access_log\..*",
        r"cluster_manager\.(active_clusters|cluster_removed|warming_clusters|cds\.update_rejected|cds\.update_success"
        r"|cds\.version_text)",
        r"cluster\..*\.(upstream_(rq|cx)_(active|total|[0-9].*|retry.*|connect_fail|rx_reset|tx_reset|timeout|time)"
        r"|membership_.*|update_rejected|version_text|health_check\..*)",
    )
    return [{"safe_regex": {"regex": pattern}} for pattern in patterns]
