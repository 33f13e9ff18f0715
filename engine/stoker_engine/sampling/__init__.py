"""Selects tokens from logits, vectorized over the batch."""
