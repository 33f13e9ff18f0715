"""Which attention backend runs where."""

from __future__ import annotations

import logging
from typing import Final

import torch

from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.attention.native import NativeBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract import names
from stoker_engine.contract.errors import ArgumentError
from stoker_engine.kernels.native.library import native_library
from stoker_engine.kernels.select import lack_of_triton

logger = logging.getLogger(__name__)

_FLAG: Final = "--attention-backend"


def attention_backend(
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    name: names.AttentionBackend = "auto",
) -> AttentionBackend:
    """The backend for tensors of `dtype` on `device`: by this name, or the fastest.

    Args:
        batch_invariant: every row's result must be the same in every batch, bit for bit. The CPU's kernels are so by
            construction (products and activations too), Triton's have forms that are (`select_kernels`).

    Raises:
        ArgumentError: this backend cannot run here, or batch invariance cannot be kept.
    """
    backend = _backend(device, dtype, name, batch_invariant)
    if batch_invariant and isinstance(backend, SdpaBackend):
        raise ArgumentError(
            "--batch-invariant",
            f"needs Triton's kernels on a GPU, or the CPU's in bfloat16 or float32, and this is "
            f"{str(dtype).removeprefix('torch.')} on {device.type}, by {_FLAG} {_name_of(backend)}"
            + ("; choose --dtype, or see the log for why they are not available" * (device.type == "cpu")),
        )
    logger.info("attention is computed by %s", _name_of(backend))
    return backend


def _backend(
    device: torch.device, dtype: torch.dtype, name: names.AttentionBackend, batch_invariant: bool
) -> AttentionBackend:
    if name == "sdpa":
        return SdpaBackend()
    library = native_library(device, dtype) if name in ("auto", "native") else None
    if library is not None:
        return NativeBackend(library)
    if name == "native":
        here = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        raise ArgumentError(
            _FLAG, f"native computes in bfloat16 or float32 on a CPU, not in {here}; choose auto, or sdpa"
        )
    lacks = lack_of_triton(device)
    if lacks is None and (name == "triton" or device.type == "cuda"):
        from stoker_engine.attention.triton import TritonBackend

        return TritonBackend(batch_invariant)
    if name == "triton":
        raise ArgumentError(_FLAG, f"triton cannot run here: {lacks}; choose auto, or sdpa")
    if device.type == "cuda":
        logger.warning("attention is slow here, by sdpa: %s", lacks)
    return SdpaBackend()


def _name_of(backend: AttentionBackend) -> str:
    match backend:
        case NativeBackend():
            return "native"
        case SdpaBackend():
            return "sdpa"
        case _:
            return "triton"
