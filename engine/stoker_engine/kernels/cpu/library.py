"""Loads the library of kernels of the widest ISA that this processor runs, prebuilt or compiled."""

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
    """The kernels; None where they cannot be had, which one log line explains.

    ``STOKER_NATIVE_KERNELS=0`` turns them off, and the name of an ISA chooses it, also one that has not been tried.
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
        reasons.append("none of this processor's has been tried" if setting == "1" else f"none is called {setting!r}")
        remedy = f"STOKER_NATIVE_KERNELS=LEVEL runs one nevertheless: {names}"
    else:
        reasons.append("this kind of processor is not known")
        remedy = "Linux on x86-64 and on 64-bit Arm is"
    logger.warning(
        "CPU kernels are not available, and torch's operators run instead, several times slower: %s. %s",
        "; ".join(reasons),
        remedy,
    )
    return None


def load(isa: Isa) -> ctypes.CDLL:
    """The library of one ISA: prebuilt, from the cache folder, or compiled into it.

    Raises:
        BuildError: it is not there and cannot be compiled, or this system does not run it.
    """
    started = time.monotonic()
    prebuilt = PREBUILT / file_name(isa)
    path = prebuilt if prebuilt.is_file() else build(isa, cache_folder() / "native")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    if not loaded.stoker_prepare():
        raise BuildError("the system does not allow this process to use its registers")
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
    """The library, if it computes on such tensors: on the CPU, bfloat16 or float32."""
    return library() if device.type == "cpu" and dtype in _DTYPES else None
