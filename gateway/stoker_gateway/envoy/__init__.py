"""Envoy, which moves the bytes: what it is told to do, and its process."""
