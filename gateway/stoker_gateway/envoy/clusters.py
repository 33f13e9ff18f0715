"""Envoy's clusters: one for each endpoint, among whose servers the picker chooses, and one for the picker.

Envoy sends requests only to servers that the picker chose. With `fail_open`, Envoy chooses the server of a request for
which the picker chose none.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from stoker_gateway.envoy import access_log_lines
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.envoy.values import PICKER, TYPE, Config, pipe, resources, seconds, socket_address
from stoker_gateway.protocol.envoy_headers import DESTINATION, DESTINATION_METADATA
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry

#: Idle timeout of connections to servers, in seconds. It must be shorter than the servers' idle timeouts (Stoker's
#: engine: 75 s, uvicorn: 5 s), because a request on a connection that is being closed costs a retry.
_UPSTREAM_IDLE_S: Final = 4
_CONNECT_TIMEOUT_S: Final = 2
#: Threshold that disables a circuit breaker, because the picker limits the requests of each server.
_UNLIMITED: Final = 1 << 30


def clusters(model_registry: ModelRegistry, settings: EnvoySettings) -> Config:
    """Return the content of the clusters file: one cluster for each endpoint."""
    return resources(_cluster(endpoint, settings) for endpoint in model_registry.endpoints.values())


def servers(endpoint: Endpoint) -> Config:
    """Return the content of the servers file of an endpoint's cluster.

    Raises:
        ValueError: an address is not ``IP:PORT``.
    """
    return resources(
        [
            {
                "@type": f"{TYPE}config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": endpoint.cluster,
                "endpoints": [
                    {"lb_endpoints": [{"endpoint": {"address": _address(server)}} for server in endpoint.servers]}
                ],
            }
        ]
    )


def _address(server: str) -> Config:
    host, colon, port = server.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"{server!r} is not IP:PORT")
    return socket_address(str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port))


def _cluster(endpoint: Endpoint, settings: EnvoySettings) -> Config:
    return {
        "@type": f"{TYPE}config.cluster.v3.Cluster",
        "name": endpoint.cluster,
        "metadata": {"filter_metadata": {access_log_lines.METADATA: {access_log_lines.MODEL: endpoint.name}}},
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": str(settings.servers_file(endpoint.cluster))},
            }
        },
        "connect_timeout": seconds(_CONNECT_TIMEOUT_S),
        "load_balancing_policy": {"policies": [{"typed_extension_config": _picked_server(settings)}]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": _UNLIMITED,
                    "max_pending_requests": _UNLIMITED,
                    "max_requests": _UNLIMITED,
                    # If one of two servers dies, half of the active requests are retried at the same time, each once.
                    "retry_budget": {"budget_percent": {"value": 50}, "min_retry_concurrency": 100},
                }
            ]
        },
        # No outlier detection: the override-host policy sends requests to ejected servers too (tested). The picker
        # avoids failing servers instead.
        # Envoy notices a silently broken connection only when a request on it fails. Each client connection has its own
        # upstream connections, so the retry is unlikely to use another broken one.
        "connection_pool_per_downstream_connection": True,
        "upstream_connection_options": {
            # Detects servers that disappeared without closing their connections.
            "tcp_keepalive": {"keepalive_time": 15, "keepalive_interval": 5, "keepalive_probes": 3}
        },
        "typed_extension_protocol_options": _protocol(
            {
                "common_http_protocol_options": {"idle_timeout": seconds(_UPSTREAM_IDLE_S)},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        ),
    }


def _protocol(options: Config) -> Config:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {f"envoy.{kind}": {"@type": f"{TYPE}{kind}", **options}}


def _picked_server(settings: EnvoySettings) -> Config:
    """Return the policy that sends a request to the first of the picker's servers, and its retry to the next.
    Servers outside of the cluster are skipped. If none is left, Envoy uses no server or, with `fail_open`, any."""
    return {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
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
    """Return a policy that draws two servers and uses the one with fewer active requests."""
    return {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {
            "@type": f"{TYPE}extensions.load_balancing_policies.least_request.v3.LeastRequest",
            "choice_count": {"value": 2},
        },
    }


def _no_server() -> Config:
    """Return a policy that never finds a server: it selects by metadata that no server has, without a fallback."""
    kind = f"{TYPE}extensions.load_balancing_policies"
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


def picker_cluster(settings: EnvoySettings) -> Config:
    """Return the picker's cluster, with health checks."""
    return {
        "name": PICKER,
        "type": "STATIC",
        "connect_timeout": seconds(_CONNECT_TIMEOUT_S),
        "load_assignment": {
            "cluster_name": PICKER,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": pipe(settings.picker_socket)}}]}],
        },
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": _UNLIMITED, "max_pending_requests": _UNLIMITED, "max_requests": _UNLIMITED}
            ]
        },
        # Without `fail_open`, the panic threshold of 100 % makes Envoy send requests to an unhealthy picker too.
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
