"""Paged attention, and the operations before it: norms of heads, RoPE, storage in the KV cache."""
