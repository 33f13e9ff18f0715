"""In which dtype a model is computed."""

from __future__ import annotations

from stoker_engine.contract.names import DTYPES


def compute_dtype(requested: str | None, stored: str, *, quantized: bool, on_cpu: bool) -> str:
    """The dtype of activations, and of weights that are not quantized.

    A checkpoint of float16 whose matrices are quantized is computed in bfloat16 on CPUs, whose kernels have no float16:
    its embedding, head and norms take as many bytes, and its matrices are stored as they are.

    Args:
        requested: what ``--dtype`` says; None and ``auto``: the checkpoint's own.
        stored: the checkpoint's own, by config.json's name (``bfloat16``, ``torch.bfloat16``).
        quantized: whether its matrices are stored in a format of their own, or are to be.
        on_cpu: whether it runs on a CPU.
    """
    if requested is not None and requested != "auto":
        return requested
    stored = stored.removeprefix("torch.")
    return "bfloat16" if stored == "float16" and quantized and on_cpu else stored


def why_not_computed(dtype: str) -> str:
    """Why a checkpoint of that `compute_dtype` is refused; empty: it is computed."""
    if dtype in DTYPES and dtype != "auto":
        return ""
    return f"the checkpoint's dtype is {dtype}; choose --dtype float32, bfloat16 or float16"
