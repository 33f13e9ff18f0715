"""Envoy, the data plane of the gateway: its configuration, process and admin interface."""
