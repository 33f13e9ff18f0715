"""Builds Kubernetes objects from a spec and its plan. Pure and deterministic."""
