"""LoRA adapters (Hu et al., 2021): y = W x + B A x, with matrices A and B for each adapter and linear operation.

Adapters are read from PEFT's folders, checked against the model, and applied in its linear operations. Each row of a
batch may have a different adapter.
"""
