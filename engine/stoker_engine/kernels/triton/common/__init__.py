"""Shared code of the Triton kernels: arithmetic, limits of GPUs, registration of operations, and kernel variants."""
