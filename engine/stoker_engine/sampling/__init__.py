"""Logits → tokens, vectorised over the batch."""
