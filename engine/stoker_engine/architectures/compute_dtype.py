"""Dtype in which a model is computed."""

from __future__ import annotations

from stoker_engine.contract.names import DTYPES


def compute_dtype(requested: str | None, stored: str, *, quantized: bool, on_cpu: bool) -> str:
    """Return the dtype of activations and of weights that are not quantized.

    By default this is the checkpoint's dtype. But a float16 checkpoint with quantized matrices is computed in bfloat16
    on CPUs, which lack float16 kernels for quantized matrices. All weights keep their size in bytes.

    Args:
        requested: value of ``--dtype``; None and ``auto``: the default.
        stored: the checkpoint's dtype, as in config.json (``bfloat16``, ``torch.bfloat16``).
        quantized: whether the matrices are quantized, in the checkpoint or on load.
        on_cpu: whether the model runs on a CPU.
    """
    if requested is not None and requested != "auto":
        return requested
    stored = stored.removeprefix("torch.")
    return "bfloat16" if stored == "float16" and quantized and on_cpu else stored


def why_not_computed(dtype: str) -> str:
    """Return why the compute dtype is not supported, or an empty string if it is."""
    if dtype in DTYPES and dtype != "auto":
        return ""
    return f"the checkpoint's dtype is {dtype}; choose --dtype float32, bfloat16 or float16"
