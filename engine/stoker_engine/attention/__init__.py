"""Attention over the paged KV cache: one seam, a backend for each way to compute it."""
