"""Product of a tile of weights and of tokens, both in 8 bits: e4m3 or int8 (`kernels/w8a8_linear.py` defines it).

The tile of weights is the left operand, and tokens are the columns of the right one, which wastes little for few
tokens. Sums of e4m3 are float32. Where groups of columns share scales, each group is a step: its sum is scaled, and
added in float32 (DeepSeek-V3's technical report, 2024). Sums of int8 are exact.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import dot, widened

#: Number of inner elements that are multiplied at once, and of columns of a group.
STEP: Final = 128


@triton.jit
def scaled_product(  # type: ignore[no-untyped-def]
    from_weights,
    from_x,
    from_scales,
    from_x_scales,
    outputs,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the scaled products, float32 [OUTPUTS, TOKENS].

    Args:
        from_weights, from_x: pointers to rows of codes [OUTPUTS] and of values [TOKENS].
        from_scales: pointers to the first scale of each row of codes [OUTPUTS]; the next group's scale is `outputs`
            elements further.
        from_x_scales: pointers to the first scale of each token [TOKENS]; the next group's scale is the next element.
        outputs: number of rows of the matrix.
        GROUP: number of columns that share a scale, STEP or 0 (all).
    """
    DTYPE: tl.constexpr = tl.int32 if from_x.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros([from_weights.shape[0], from_x.shape[0]], DTYPE)
    for step in tl.range(0, (INNER + STEP - 1) // STEP):
        at = step * STEP + tl.arange(0, STEP)
        if INNER % STEP:
            is_inner = at < INNER
            left = tl.load(from_weights[:, None] + at[None, :], mask=is_inner[None, :], other=0.0)
            right = tl.load(from_x[None, :] + at[:, None], mask=is_inner[:, None], other=0.0)
        else:
            left = tl.load(from_weights[:, None] + at[None, :])
            right = tl.load(from_x[None, :] + at[:, None])
        if GROUP:
            scale = widened(tl.load(from_scales + step * outputs))
            sums += dot(left, right) * scale[:, None] * tl.load(from_x_scales + step)[None, :]
        else:
            sums += dot(left, right)
    if GROUP:
        return sums
    else:
        return sums.to(tl.float32) * widened(tl.load(from_scales))[:, None] * tl.load(from_x_scales)[None, :]
