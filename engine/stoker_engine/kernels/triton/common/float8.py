"""Conversion of 8-bit elements without the instructions for 8-bit floats: the same bits on every GPU.

    e4m3   s eeee mmm   bias 7, no infinity, NaN is all ones        (OCP 8-bit floating point, 2023)
    e5m2   s eeeee mm   the upper half of a float16

The hardware of gfx942 uses a different e4m3 (fnuz); stored values are OCP's everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import widened

#: Storage formats of the KV cache: values of the kernels' `CODE`.
PLAIN, E4M3, E5M2, INT8 = 0, 1, 2, 3

_CODES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.int8: INT8}


def code_of(dtype: torch.dtype) -> int:
    """Return the storage format of a cache of `dtype`."""
    return _CODES.get(dtype, PLAIN)


def stored_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as kernels get it: 8-bit dtypes as uint8, others unchanged."""
    return cache.view(torch.uint8) if cache.dtype in _CODES else cache


@triton.jit
def decode(stored, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert stored elements to DTYPE, without their scales; exact for 8-bit formats."""
    if CODE == 0:
        if stored.dtype == tl.bfloat16 and DTYPE == tl.float16:  # clamps values that are too large
            return tl.minimum(tl.maximum(widened(stored), -65504.0), 65504.0, propagate_nan=tl.PropagateNan.ALL).to(
                DTYPE
            )
        else:
            return stored.to(DTYPE)
    elif CODE == 1:
        wide = stored.to(tl.uint16)
        magnitude = wide & 0x7F
        # float16 has an exponent bias of 15 instead of 7: multiply by 2⁸, which is right also for subnormals.
        half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32)).to(DTYPE)
    elif CODE == 2:
        return (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        return stored.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


@triton.jit
def encode(x, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode float32 values in the format's range (to the nearest, ties to even) or NaN, which becomes 0 in int8."""
    MANTISSA: tl.constexpr = 3 if CODE == 1 else 2
    LEAST: tl.constexpr = 121 if CODE == 1 else 113  # float32's biased exponent of the smallest normal value
    magnitude = tl.abs(x)
    if CODE == 3:
        steps = _steps(tl.where(x == x, magnitude, 0.0), 12582912.0)
        return tl.where(x < 0, -steps, steps).to(tl.uint8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, LEAST)
        far = (((exponent - MANTISSA + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
        code = ((exponent - LEAST) << MANTISSA) + _steps(magnitude, far)
        return (((bits >> 24) & 0x80) | tl.where(x == x, code, 0x7F)).to(tl.uint8)


@triton.jit
def _steps(magnitude, far):  # type: ignore[no-untyped-def]
    """Round a magnitude to a whole number of steps, below 2²². At `far`, 1.5 × 2²³ steps, float32 has a resolution of
    one step."""
    return (magnitude + far).to(tl.int32, bitcast=True) & 0x3FFFFF


@triton.jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of the magnitude of float32 values, int32. They are ordered like the magnitudes, with NaN last,
    so that their maximum keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
