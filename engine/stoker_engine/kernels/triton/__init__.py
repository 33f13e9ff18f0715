"""Triton kernels for GPUs; the torch references in `kernels` define the operations."""

import os

# Fuse multiplications and additions, as `compile.ahead_of_time` does; the default differs between versions of Triton.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
