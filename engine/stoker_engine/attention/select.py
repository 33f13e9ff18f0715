"""Selection of the attention backend."""

from __future__ import annotations

import logging

import torch

from stoker_common.errors import ArgumentError
from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.external import FLAG, AttentionRequirements, by_package, dtype_name
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract import names
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import has_little_shared_memory, lack_of_triton

logger = logging.getLogger(__name__)


def attention_backend(
    device: torch.device,
    requirements: AttentionRequirements,
    batch_invariant: bool = False,
    name: names.AttentionBackend = "auto",
) -> AttentionBackend:
    """Return the backend with this name, or for ``auto`` the fastest built-in one on `device`.

    Args:
        batch_invariant: every row's result must have the same bits in every batch. All native CPU kernels (also GEMMs
            and activations) are batch invariant; Triton has batch-invariant variants (`select_kernels`).

    Raises:
        ArgumentError: the backend is not available, or it is not batch invariant although that is required.
    """
    backend, taken = _backend(device, requirements, name, batch_invariant)
    if batch_invariant and not backend.capabilities.batch_invariant:
        raise ArgumentError(
            "--batch-invariant",
            f"needs the Triton kernels on a GPU, or the native kernels on a CPU in bfloat16 or float32; "
            f"the model would run in {dtype_name(requirements.dtype)} on {device.type} with {FLAG} {taken}"
            + ("; change --dtype, or see the log if native kernels are missing" * (device.type == "cpu")),
        )
    logger.info("attention backend: %s", taken)
    return backend


def _backend(
    device: torch.device, requirements: AttentionRequirements, name: names.AttentionBackend, batch_invariant: bool
) -> tuple[AttentionBackend, str]:
    if name == "sdpa":
        return SdpaBackend(), name
    library = cpu_library(device, requirements.dtype) if name in ("auto", "native") else None
    if library is not None:
        return CpuBackend(library), "native"
    if name == "native":
        requested = f"{dtype_name(requirements.dtype)} on {device.type}"
        raise ArgumentError(
            FLAG,
            f"native is not available for {requested}: it needs a CPU with native kernels (see the log) and "
            "bfloat16 or float32; choose auto or sdpa",
        )
    lacks = lack_of_triton(device) or _lack_of_room(device, requirements)
    if name in ("flash-attn", "flashinfer", "fa3"):
        return by_package(name, requirements, lacks or (_lack_of_hopper(device) if name == "fa3" else None)), name
    if lacks is None and (name == "triton" or device.type == "cuda"):
        from stoker_engine.attention.triton import TritonBackend

        return TritonBackend(batch_invariant), "triton"
    if name == "triton":
        raise ArgumentError(FLAG, f"triton is not available: {lacks}; choose auto or sdpa")
    if device.type == "cuda":
        logger.warning("triton is not available, using the slow attention backend sdpa: %s", lacks)
    return SdpaBackend(), "sdpa"


def _lack_of_room(device: torch.device, requirements: AttentionRequirements) -> str | None:
    is_latent = any(layer.latent is not None for layer in requirements.layers)
    if is_latent and requirements.dtype == torch.float32 and has_little_shared_memory(device):
        return "latent attention in float32 needs more shared memory than this GPU has (--dtype bfloat16 does not)"
    return None


def _lack_of_hopper(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found == (9, 0):
            return None
        return f"its kernels need compute capability 9.0, and this GPU has {found[0]}.{found[1]}"
    return "its kernels need an NVIDIA GPU of compute capability 9.0"
