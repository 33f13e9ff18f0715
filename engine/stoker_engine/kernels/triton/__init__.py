"""Kernels for GPUs, in Triton: an operation a file, beside the torch reference that defines it (`kernels`)."""

import os

# Products and sums are fused, as kernels are compiled ahead of time; Triton's own default changes with its versions.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
