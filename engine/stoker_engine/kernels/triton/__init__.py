"""Kernels for GPUs, in Triton: an operation a file, beside the torch reference that defines it (`kernels`)."""
