"""Kubernetes objects from a spec and its plan. Pure: the same in, the same out."""
