"""Envoy's listener: the clients' connections, and the filters that requests pass through.

    client ─► internal headers removed ─► path allowed ─► picker chooses cluster and servers ─► router

A request for which the picker named no cluster, or a server outside of the cluster, gets status 503, unless `fail_open`
is set.
"""

from __future__ import annotations

from typing import Final

from stoker_gateway.envoy import access_log_lines, browsers, decoding, ended_log, local_replies, usage_filter
from stoker_gateway.envoy.routes import route_config
from stoker_gateway.envoy.settings import EnvoySettings, TLSFiles
from stoker_gateway.envoy.values import LISTENER, PICKER, TYPE, Config, resources, seconds, socket_address
from stoker_gateway.protocol.envoy_headers import DESTINATION_METADATA, METADATA, SUBSET_METADATA
from stoker_gateway.registry.addresses import EVERY

#: Prefixes of headers that Envoy removes from clients' requests, because the picker, Envoy or servers trust them.
INTERNAL_HEADERS: Final = ("x-stoker-", "x-gateway-", "x-envoy-")

#: Name of the certificate's Secret in Envoy's configuration.
CERTIFICATE: Final = "gateway"
#: Buffer for data to a client that does not read, in bytes. Request bodies have a limit of their own.
_CONNECTION_BUFFER_BYTES: Final = 1 << 20
#: Seconds by which the maximum message timeout exceeds the maximum hold. Envoy allows at most an hour.
_EXTENSION_S: Final = 30


def listener(settings: EnvoySettings) -> Config:
    """Return the listener for clients."""
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
        "@type": f"{TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificate_sds_secret_configs": [{"name": CERTIFICATE, "sds_config": path}],
        },
    }
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context}}


def certificate(tls: TLSFiles) -> Config:
    """Return the content of the file with the certificate's paths. Envoy reloads the certificate when a file or
    symbolic link is moved into its folder, which is how Kubernetes replaces all files of a Secret at once.
    """
    return resources(
        [
            {
                "@type": f"{TYPE}extensions.transport_sockets.tls.v3.Secret",
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
    """Return the HTTP connection manager, with strict parsing of requests."""
    return {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": LISTENER,
        "codec_type": "AUTO",
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {
                    "@type": f"{TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                    "mutations": [
                        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}
                        for prefix in INTERNAL_HEADERS
                    ],
                },
            }
        ],
        "normalize_path": True,
        "merge_slashes": True,
        # Clients escape slashes in model names. Unescaping precedes routing, so the path that is checked is the path
        # that is forwarded.
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
        "request_headers_timeout": seconds(settings.headers_s),
        # These timeouts also run while the picker holds a request.
        "request_timeout": seconds(settings.upload_s + settings.max_held_s),
        "stream_idle_timeout": seconds(settings.idle_s + settings.max_held_s),
        # Proxies such as nginx use HTTP/1.0 by default, and always send a Host header.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": LISTENER},
        "http2_protocol_options": {"max_concurrent_streams": 2048},
        "local_reply_config": local_replies.config(),
        "access_log": [ended_log.config(PICKER), *([access_log_lines.config()] if settings.access_log else [])],
        "route_config": route_config(settings),
        "http_filters": _filters(settings),
    }


def _listening_address(host: str, port: int) -> Config:
    address = socket_address(host, port)
    if host == EVERY:
        address["socket_address"]["ipv4_compat"] = True
    return address


def _filters(settings: EnvoySettings) -> list[Config]:
    filters = "extensions.filters.http"
    return [
        *([browsers.filter_config()] if settings.allowed_origins else []),
        {
            "name": "ready",
            "typed_config": {
                "@type": f"{TYPE}{filters}.health_check.v3.HealthCheck",
                "pass_through_mode": False,
                "headers": [{"name": ":path", "string_match": {"exact": "/ready"}}],
                "cluster_min_healthy_percentages": {PICKER: {"value": 100}},
            },
        },
        decoding.gzip(),
        {
            "name": "picker",
            "typed_config": {
                "@type": f"{TYPE}{filters}.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
                # If the picker fails, Envoy continues: a request without a decision finds no cluster, and a response in
                # progress continues even if the picker dies before the end of its stream.
                "failure_mode_allow": True,
                "message_timeout": seconds(settings.max_wait_s + 5),
                # The picker extends the message timeout of a request that it holds.
                **({"max_message_timeout": seconds(settings.max_held_s + _EXTENSION_S)} if settings.max_held_s else {}),
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
            "typed_config": {"@type": f"{TYPE}{filters}.router.v3.Router", "suppress_envoy_headers": True},
        },
    ]
