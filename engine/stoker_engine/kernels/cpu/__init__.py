"""CPU kernels: C++ called through ctypes, fast versions of the operations that `kernels` defines in torch.

    csrc/attention   paged attention by vector instructions and by AMX; storage formats of the KV cache
    csrc/gemm        GEMM with weights in rows and in panels, by integers, and by AMX tiles
    csrc/gguf        GGUF blocks: GEMM, panels, dequantization
    csrc/quant       weights in groups that share a scale
    csrc/lora        LoRA adapters
    csrc/ops         norms, RoPE, activations, argmax, masks
    csrc/layer       a decoder layer in one call, composed of the other functions
    csrc/comm        shared-memory collectives for ranks of one machine (`parallel/shm_communicator.py`)
    csrc/common      vectors of the processor's width, threads, memory
    isa.py           instruction sets, from the widest to the baseline
    build.py         compiles a library for each instruction set, for an image or on first use
    library.py       loads the widest library that this processor runs
    *.py             bindings: convert tensors to pointers and strides

The kernels are batch-invariant (``--batch-invariant``): a row's bits never depend on its batch, on prefix-cache hits,
or on the chunking of the prefill.
"""
