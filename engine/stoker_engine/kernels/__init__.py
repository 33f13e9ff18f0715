"""Kernels. Files at the top level that are not listed here define operations, or formats of their arguments, by
reference implementations in torch.

bundle.py       interface: all operations of a model, as one object
reference.py    bundle of the reference implementations
cpu/            C++ kernels for CPUs
triton/         Triton kernels for GPUs
select.py       choice of the bundle for a device and dtype, once for each model
prebuilt.py, compile_progress.py
                prebuilt Triton kernels of an image, and progress of compiling others
"""
