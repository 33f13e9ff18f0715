"""Envoy's bootstrap configuration, as plain values. The other configuration is in files that Envoy watches: clusters
and servers (`clusters.py`), and the paths of the certificate (`listener.py`).
"""

from __future__ import annotations

from stoker_gateway.envoy.clusters import picker_cluster
from stoker_gateway.envoy.listener import listener
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.envoy.values import LISTENER, TYPE, Config, pipe


def bootstrap(settings: EnvoySettings) -> Config:
    """Return Envoy's bootstrap configuration."""
    return {
        "node": {"id": "stoker-gateway", "cluster": "stoker-gateway"},
        "admin": {"address": pipe(settings.admin_socket)},
        "dynamic_resources": {
            "cds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": str(settings.clusters_file)},
            }
        },
        "static_resources": {"listeners": [listener(settings)], "clusters": [picker_cluster(settings)]},
        "stats_config": {"stats_matcher": {"inclusion_list": {"patterns": _statistics()}}},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{TYPE}extensions.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": settings.max_connections,
                    },
                }
            ]
        },
    }


def _statistics() -> list[Config]:
    """Return the patterns of the statistics that Envoy keeps; it has hundreds for each cluster."""
    patterns = (
        r"server\.(live|state|uptime|memory_allocated|total_connections|concurrency)",
        r"listener_manager\.(workers_started|total_listeners_active)",
        r"listener\..*\.(downstream_cx_active|downstream_cx_total|downstream_global_cx_overflow)",
        rf"http\.{LISTENER}\.(downstream_(cx|rq)_.*|ext_proc\..*|no_route|.*_timeout)",
        r"access_logs\.grpc_access_log\..*",
        r"cluster_manager\.(active_clusters|cluster_removed|warming_clusters|cds\.update_rejected|cds\.update_success"
        r"|cds\.version_text)",
        r"cluster\..*\.(upstream_(rq|cx)_(active|pending_active|total|[0-9].*|retry.*|connect_fail|rx_reset|tx_reset|timeout|time)"
        r"|membership_.*|update_rejected|version_text|health_check\..*)",
    )
    return [{"safe_regex": {"regex": pattern}} for pattern in patterns]
