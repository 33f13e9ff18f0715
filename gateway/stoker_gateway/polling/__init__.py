"""Polling of the servers' readiness, load and models."""
