"""LoRA adapters (Hu et al., 2021): y = W x + B A x, with a B and an A for each adapter and linear operation.

Adapters are read from PEFT's folders, checked against the model, and added to what its linear operations compute, each
row of a batch by its own adapter.
"""
