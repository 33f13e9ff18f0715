"""Choice of kernels for a device and dtype."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Final

import torch

from stoker_engine.kernels.bundle import Kernels, QuantizedRows
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.w8a8_linear import fp8_linear

logger = logging.getLogger(__name__)

#: Lowest compute capability of NVIDIA GPUs that the Triton kernels support.
_OLDEST: Final = (8, 0)

#: Lowest compute capability of NVIDIA GPUs with FP8 tensor cores.
_FP8: Final = (8, 9)


def select_kernels(
    device: torch.device, dtype: torch.dtype, batch_invariant: bool = False, fp8_weight_only: bool = False
) -> Kernels:
    """Return the fastest kernels for a model of `dtype` on `device`.

    Args:
        batch_invariant: whether a row's result must not depend on its batch. `attention.select.attention_backend`
            rejects combinations that do not support it.
        fp8_weight_only: whether activations are not quantized, even if FP8 tensor cores could multiply the weights.
    """
    library = cpu_library(device, dtype)
    if library is not None:
        return cpu_kernels(library)
    if device.type == "cuda" and lack_of_triton(device) is None:
        is_amd = torch.version.hip is not None
        capability = None if is_amd else torch.cuda.get_device_capability(device)
        has_fp8 = not fp8_weight_only and multiplies_fp8(capability)
        return triton_kernels(capability if has_fp8 else None, dtype, batch_invariant, fp8_weight_only)
    return REFERENCE


def multiplies_fp8(capability: tuple[int, int] | None) -> bool:
    """Whether the installed torch can multiply e4m3 with scales for rows on the current GPU; logs a warning if the GPU
    can, but torch cannot. torch's kernel for compute capability 8.9 is correct in CUDA graphs since 2.12
    (pytorch#177651).

    Args:
        capability: compute capability of an NVIDIA GPU; None: an AMD GPU.
    """
    if capability is None or capability < _FP8:
        return False
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if capability == _FP8 and version < (2, 12):
        logger.warning("torch %s is too old for FP8 tensor cores of this GPU; 2.12 is needed", torch.__version__)
        return False
    try:
        _try_fp8()
    except RuntimeError as error:
        logger.warning("torch cannot use FP8 tensor cores of this GPU: %s", str(error).partition("\n")[0])
        return False
    return True


def _try_fp8() -> None:
    values = torch.zeros((16, 16), dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.ones((16, 1), device="cuda")
    fp8_linear(QuantizedRows(values, scales), values, scales.t(), torch.bfloat16)


def triton_kernels(
    capability: tuple[int, int] | None, dtype: torch.dtype, batch_invariant: bool, fp8_weight_only: bool
) -> Kernels:
    """Return the Triton kernels for a model of `dtype`. For the flags see `select_kernels`.

    torch multiplies e4m3 with scales for rows in an order of summation that may depend on the number of rows, and on
    some GPUs returns only bfloat16. So it is used neither with `batch_invariant` nor for models of other dtypes, nor on
    AMD's GPUs, whose e4m3 is a different one before gfx950.

    Args:
        capability: compute capability of an NVIDIA GPU; None: an AMD GPU.
    """
    from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
    from stoker_engine.kernels.triton.bundle import TRITON, TRITON_FP8

    if batch_invariant:
        return BATCH_INVARIANT
    has_fp8 = capability is not None and capability >= _FP8 and dtype == torch.bfloat16
    return TRITON_FP8 if has_fp8 and not fp8_weight_only else TRITON


def has_little_shared_memory(device: torch.device) -> bool:
    """Whether a program can use at most 64 KiB of shared memory, as on AMD GPUs before gfx950."""
    if device.type != "cuda" or torch.version.hip is None:
        return False
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block) <= 64 << 10


def lack_of_triton(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "its kernels need a GPU, and this is a CPU"
    if device.type != "cuda":
        return f"its kernels need an NVIDIA or AMD GPU, and this is {device.type}"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < _OLDEST:
        oldest, this = (".".join(map(str, each)) for each in (_OLDEST, found))
        return f"its kernels need compute capability {oldest}, and this GPU has {this}"
    return None
