"""Kernels. Each file at the top level defines one operation by its reference implementation in torch.

bundle.py       interface: all operations of a model, as one object
reference.py    bundle of the reference implementations
cpu/            C++ kernels for CPUs
triton/         Triton kernels for GPUs
select.py       choice of the bundle for a device and dtype, once for each model
"""
