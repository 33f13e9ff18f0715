"""Polling of the servers' readiness and load."""
