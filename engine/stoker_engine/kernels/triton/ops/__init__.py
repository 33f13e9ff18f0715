"""Element-wise and row-wise operations: activations, norms, RoPE."""
