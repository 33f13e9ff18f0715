"""What all Triton kernels use: arithmetic, the GPU's limits, the registered operations and compiled variants."""
