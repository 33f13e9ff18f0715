"""Attention over the paged KV cache: the backend interface, and one backend per implementation."""
