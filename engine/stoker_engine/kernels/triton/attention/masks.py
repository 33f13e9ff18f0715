"""Which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def oldest_visible(at, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the position of the oldest key that a query at position `at` sees."""
    if WINDOW > 0:
        return tl.maximum(at - WINDOW + 1, 0)
    else:
        return 0


@triton.jit
def is_visible(distance, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether queries see keys; `distance`: positions of the keys, minus those of the queries."""
    visible = distance <= 0
    if WINDOW > 0:
        visible = visible & (distance > -WINDOW)
    return visible
