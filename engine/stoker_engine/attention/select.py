"""Which attention backend runs where."""

from __future__ import annotations

import torch

from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.attention.native import NativeBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.errors import ArgumentError
from stoker_engine.kernels.native.library import native_library


def attention_backend(device: torch.device, dtype: torch.dtype, batch_invariant: bool = False) -> AttentionBackend:
    """The fastest backend for tensors of `dtype` on `device`.

    Args:
        batch_invariant: every row's result must be the same in every batch, bit for bit. The CPU's kernels are so by
            construction (products and activations too), and nothing else is.

    Raises:
        ArgumentError: batch invariance cannot be kept here.
    """
    library = native_library(device, dtype)
    if library is not None:
        return NativeBackend(library)
    if batch_invariant:
        raise ArgumentError(
            "--batch-invariant",
            f"needs the CPU's kernels in bfloat16 or float32, and this is {str(dtype).removeprefix('torch.')} on "
            f"{device.type}"
            + ("; choose --dtype, or see the log for why they are not available" * (device.type == "cpu")),
        )
    return SdpaBackend()
