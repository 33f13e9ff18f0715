"""Storage of keys and values in the paged cache.

8-bit elements are stored with a scale: one for the layer, or one for each token and head.

    stored = round(x / scale)    to the nearest, ties to even; within ±limit: 448 for e4m3, 57344 for e5m2, 127 for int8
    scale  = max |x| / limit     if each token and head has its own (always in int8); 1 if all of x is 0

Larger finite values are clamped. NaN and infinity are stored as NaN, so that a broken request is detected: NaN elements
in float8, a NaN scale where each token and head has its own.
"""

from __future__ import annotations

import torch

#: Largest finite value of the dtypes that are stored with a scale.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def kv_store(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
    scales_of_tokens: bool = False,
) -> None:
    """Scatter `rows` [tokens, kv_heads, d] to `slot_mapping` [tokens] of `cache` [blocks, block_size, kv_heads, d].

    slot = block × block_size + offset, not negative (only Triton's kernels skip slots of -1). Blocks of the cache need
    not be contiguous.

    Args:
        scales: [blocks, block_size, kv_heads] float32, for a cache in float8 or int8.
        scales_of_tokens: whether to compute scales for each token and head, and store them in `scales`.
    """
    at = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    if scales is None:
        cache[at] = rows.to(cache.dtype)
        return
    if scales_of_tokens:
        scales[at] = token_scales(rows, cache.dtype)
    cache.view(torch.uint8)[at] = quantized(rows, scales[at], cache.dtype).view(torch.uint8)


def token_scales(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each vector: [tokens, kv_heads, d] → [tokens, kv_heads] float32."""
    largest = rows.float().abs().amax(-1)
    largest = torch.where(largest.isinf(), torch.nan, largest)
    scales = largest / LARGEST[dtype]
    return torch.where(scales == 0, 1.0, scales)


def quantized(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize `rows` [tokens, kv_heads, d] by `scales` [tokens, kv_heads] → [tokens, kv_heads, d] of `dtype`."""
    limit, x = LARGEST[dtype], rows.float()
    scaled = (x / scales.unsqueeze(-1)).clamp(-limit, limit)
    if dtype == torch.int8:
        return scaled.nan_to_num(0).round().to(dtype)
    return torch.where(x.isfinite(), scaled, torch.nan).to(dtype)


def dequantized(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize `stored` […, d] (float8 or int8) by `scales` […] float32 → […, d] float32."""
    return stored.float() * scales.unsqueeze(-1)
