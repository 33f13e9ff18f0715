"""The CPU's kernels: plain C++ behind ctypes, each the fast version of an operation that `kernels` defines in torch.

    linear.cpp  attention.cpp  rms_norm.cpp  …     what is computed; no torch in it, only pointers and strides
    product.h  panels.h                            products with rows of a weight as they are, and with packed ones
    coded_panels.h  eight_bits.h                   packed ones of integers, by x in 8 bits
    tiled_product.h  tiled_panels.h  …             the same by Intel's tile unit
    matrix.cpp                                     a weight of any kind, and the product with it
    layer.cpp                                      a decoder's layer in one call, of the functions of the others
    rows.h  memory.h                               what several of them share
    shared_ranks.cpp  shared_ranks.h               how ranks of one machine meet in memory (`parallel/shared_ranks.py`)
    simd.h  tiles.h  threads.h                     vectors as wide as the processor's; Intel's tile unit; sharing work
    levels.py                                      instruction sets, from the widest to what every processor has
    build.py                                       compiles one library a level: when an image is made, or on first use
    library.py                                     loads the widest that this processor runs
    linear.py  attention.py  …                     tensors → pointers

A row's result never depends on the batch it is computed in: each kernel's file says why. So where these run,
hit = miss, alone = together and chunked = whole hold bit for bit (``--batch-invariant``).
"""
