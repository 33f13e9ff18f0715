"""Ahead-of-time compilation, for GPUs that need not be here."""
