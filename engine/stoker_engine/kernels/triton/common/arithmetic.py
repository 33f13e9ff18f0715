"""Products of tiles and conversions that also work in Triton's interpreter.

For bfloat16 the interpreter (of Triton 3.6 to 3.9) multiplies elements' bits as integers, truncates where a GPU rounds,
and flushes subnormals to 0.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

_INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """Multiply a [M, K] × b [K, N] → [M, N] float32, or int32 for int8; float32 inputs keep full precision."""
    if a.dtype == tl.int8:
        return tl.dot(a, b, out_dtype=tl.int32)
    elif a.dtype == tl.float8e4nv:
        return tl.dot(a, b)
    elif _INTERPRETED:
        return tl.dot(widened(a), widened(b), input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def widened(x):  # type: ignore[no-untyped-def]
    """Convert x to float32, exactly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round x to DTYPE, to the nearest value, ties to even."""
    if _INTERPRETED and DTYPE == tl.bfloat16 and x.dtype != tl.bfloat16:
        wide = widened(x)
        bits = wide.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(wide == wide, upper, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
