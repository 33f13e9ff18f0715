"""Loads the kernel library for the widest tested ISA of this processor, prebuilt or compiled on first use."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time

import torch

from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.kernels.cpu.build import PREBUILT, BuildError, build, file_name
from stoker_engine.kernels.cpu.isa import Isa, usable_isas

logger = logging.getLogger(__name__)

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float

_ARGUMENTS = {
    "stoker_use_threads": (_INT,),
    "stoker_linear": (_INT, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER),
    "stoker_address_of_add_lora": (),
    "stoker_pack_lora": (_POINTER, _LONG, _INT, _POINTER),
    "stoker_has_panels": (),
    "stoker_pack_panels": (_POINTER, _LONG, _LONG),
    "stoker_panel_rows": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "stoker_has_gguf_panels": (_INT,),
    "stoker_pack_gguf_panels": (_POINTER, _LONG, _LONG),
    "stoker_gguf_panel_rows": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "stoker_gguf_dequantize": (_INT, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG),
    "stoker_group_dequantize": (
        *(_INT, _INT, _INT, _INT, _LONG),
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG),
    ),
    "stoker_has_group_panels": (*(_INT, _INT, _INT, _INT, _LONG), _LONG),
    "stoker_pack_group_panels": (*(_INT, _INT, _INT, _INT, _LONG), *(_LONG, _POINTER, _LONG)),
    "stoker_group_panel_rows": (
        *(_INT, _INT, _INT, _INT, _LONG),
        *(_LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG),
    ),
    "stoker_argmax": (_INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG),
    "stoker_keep_allowed": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG),
    "stoker_attention": (_POINTER,),
    "stoker_layers": (_POINTER, _LONG, *(_POINTER,) * 5, _LONG, _POINTER, _POINTER),
    "stoker_rms_norm": (_INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _LONG, _LONG),
    "stoker_rotary": (_INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG),
    "stoker_rope_cos_sin": (_INT, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _LONG, _LONG),
    "stoker_activation": (_INT, _INT, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG),
    "stoker_shm_all_reduce": (_POINTER, _INT, _POINTER, _LONG),
    "stoker_shm_gather_widths": (_POINTER, _INT, _LONG, _POINTER),
    "stoker_shm_all_gather": (_POINTER, _INT, _INT, _POINTER, _LONG, _POINTER, _POINTER),
    "stoker_shm_broadcast": (_POINTER, _INT, _POINTER, _LONG),
    "stoker_clamped_swiglu": (_INT, _FLOAT, _FLOAT, _POINTER, _LONG, _POINTER, _LONG, _LONG),
}

_DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels; None if they are not available, with the reason in a log line.

    ``STOKER_NATIVE_KERNELS=0`` turns them off. The name of an ISA selects that ISA, even if it was never tested,
    provided that the processor supports it.
    """
    setting = os.environ.get("STOKER_NATIVE_KERNELS") or "1"
    if setting == "0":
        logger.info("CPU kernels are turned off by STOKER_NATIVE_KERNELS=0; torch's operators run instead")
        return None
    usable = usable_isas()
    chosen = [isa for isa in usable if (isa.tried if setting == "1" else isa.name == setting)]
    reasons = []
    for isa in chosen:
        try:
            return load(isa)
        except BuildError as error:
            reasons.append(f"{isa.name}: {error}")
    if chosen:
        remedy = "Install g++, or build them into the image: python -m stoker_engine.kernels.cpu.build"
    elif usable:
        names = ", ".join(isa.name for isa in usable)
        reasons.append(
            "no supported ISA has been tested" if setting == "1" else f"no supported ISA is called {setting!r}"
        )
        remedy = f"STOKER_NATIVE_KERNELS=LEVEL runs one nevertheless: {names}"
    else:
        reasons.append("this processor architecture is not supported")
        remedy = "Supported are Linux on x86-64 and on 64-bit Arm"
    logger.warning(
        "CPU kernels are not available, and torch's operators run instead, several times slower: %s. %s",
        "; ".join(reasons),
        remedy,
    )
    return None


def load(isa: Isa) -> ctypes.CDLL:
    """Load the library for an ISA: prebuilt, from the cache folder, or compiled into it.

    Raises:
        BuildError: the library cannot be compiled, or does not run on this system.
    """
    started = time.monotonic()
    prebuilt = PREBUILT / file_name(isa)
    path = prebuilt if prebuilt.is_file() else build(isa, cache_folder() / "native")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    if not loaded.stoker_prepare():
        raise BuildError("the operating system does not permit this process to use its registers")
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, _result(name)
    loaded.stoker_use_threads(torch.get_num_threads())
    logger.info("CPU kernels: %s, %d threads (%.1f s)", isa.name, torch.get_num_threads(), time.monotonic() - started)
    return loaded


def _result(name: str) -> type[ctypes.c_int] | type[ctypes.c_void_p] | None:
    if name.startswith("stoker_address_of_"):
        return _POINTER
    return _INT if name.startswith("stoker_has_") else None


def cpu_library(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library if it supports the device and dtype: the CPU, with bfloat16 or float32."""
    return library() if device.type == "cpu" and dtype in _DTYPES else None
