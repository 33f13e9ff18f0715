"""Endpoints, their servers and keys, read from the API server."""
