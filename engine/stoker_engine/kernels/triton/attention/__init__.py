"""Paged attention, and how queries, keys and values reach it: RoPE, norms of heads, the KV cache."""
