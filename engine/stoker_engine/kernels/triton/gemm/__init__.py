"""GEMM: batch-invariant, quantized, and grouped by expert."""
