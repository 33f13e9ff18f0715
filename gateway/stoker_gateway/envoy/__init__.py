"""Envoy, the data plane of the gateway: its configuration and its process."""
