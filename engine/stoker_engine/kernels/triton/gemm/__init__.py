"""Matrix products: batch-invariant, quantized, and grouped by expert."""
