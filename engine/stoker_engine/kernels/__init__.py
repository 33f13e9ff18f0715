"""One operation a file: the plain-torch reference that defines it.

bundle.py       all operations a model is computed with, as one object
reference.py    torch's
cpu/            C++ for CPUs
triton/         Triton for GPUs
select.py       which bundle serves a device and dtype; asked once, when a model is made
"""
