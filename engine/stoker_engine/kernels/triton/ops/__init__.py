"""Element-wise and row-wise operations: activations, norms, RoPE, quantization of rows."""
