"""Ahead-of-time compilation for GPUs that this machine need not have."""
