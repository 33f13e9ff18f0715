"""The CPU's kernels: plain C++ behind ctypes, each the fast version of an operation that `kernels` defines in torch.

    csrc/attention   paged attention, on vectors and on AMX; what a KV cache may hold
    csrc/gemm        GEMM with weights: as they are stored, packed into panels, by integers, and by AMX's tiles
    csrc/gguf        GGUF's blocks: GEMM, panels, dequantization
    csrc/quant       weights in groups that share a scale
    csrc/ops         norms, RoPE, activations, argmax, masks
    csrc/layer       a decoder's layer in one call, made of the functions of the others
    csrc/comm        how ranks of one machine meet in memory (`parallel/shm_communicator.py`)
    csrc/common      vectors as wide as the processor's, threads, memory
    isa.py           instruction sets, from the widest to what every processor has
    build.py         compiles one library for each: when an image is made, or on first use
    library.py       loads the widest that this processor runs
    *.py             bindings: tensors become pointers and strides

A row's result never depends on the batch it is computed in: each kernel's file says why. So where these run,
hit = miss, alone = together and chunked = whole hold bit for bit (``--batch-invariant``).
"""
