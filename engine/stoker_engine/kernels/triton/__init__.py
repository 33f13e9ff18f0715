"""Triton kernels for GPUs, one operation in each file; the torch references in `kernels` define the operations."""

import os

# Fuse products and sums, as in ahead-of-time compilation; the default differs between versions of Triton.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
