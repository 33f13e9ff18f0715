"""Stores keys and values in the paged cache (`kernels/kv_store.py` defines the operation).

One program stores one head of a token; negative slots are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.kv_store import LARGEST
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.float8 import PLAIN, code_of, encode, stored_bytes
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation


@triton.jit
def token_scale(largest, is_broken, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a vector's scale, from its largest finite magnitude; NaN if the vector contains NaN or infinity."""
    scale = tl.div_rn(largest, LIMIT)
    return tl.where(is_broken, float("nan"), tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def fitted(x, scale, CODE: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize float32 elements to 8 bits."""
    scaled = tl.div_rn(x, scale)
    # Comparisons, unlike min and max, keep NaN.
    scaled = tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
    if CODE != 3:
        scaled = tl.where(tl.abs(x) < float("inf"), scaled, float("nan"))
    return encode(scaled, CODE)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    rows,
    cache,
    slot_mapping,
    scales,
    row_token: tl.int64,
    row_head: tl.int64,
    cache_block: tl.int64,
    cache_slot: tl.int64,
    cache_head: tl.int64,
    scale_block: tl.int64,
    scale_slot: tl.int64,
    scale_head: tl.int64,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LIMIT: tl.constexpr,
    OF_TOKENS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = tl.load(slot_mapping + token)
    if to < 0:
        return
    block, slot = to // BLOCK_SIZE, to % BLOCK_SIZE
    dims = tl.arange(0, PADDED)
    x = tl.load(rows + token * row_token + head * row_head + dims, mask=dims < SIZE, other=0.0)
    if CODE == 0:
        stored = rounded(widened(x), cache.dtype.element_ty)
    else:
        x = widened(x)
        of_scale = scales + block * scale_block + slot * scale_slot + head * scale_head
        size = tl.abs(x)
        is_finite = size < float("inf")  # also false for NaN
        if OF_TOKENS:
            largest = tl.max(tl.where(is_finite, size, 0.0), 0)
            scale = token_scale(largest, tl.max(tl.where(is_finite, 0, 1), 0) > 0, LIMIT)
            tl.store(of_scale, scale)
        else:
            scale = tl.load(of_scale)
        stored = fitted(x, scale, CODE, LIMIT)
    tl.store(cache + block * cache_block + slot * cache_slot + head * cache_head + dims, stored, mask=dims < SIZE)


@operation("stoker::kv_store", mutates_args=("cache", "scales"))
def kv_store(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None,
    scales_of_tokens: bool,
) -> None:
    """See `kernels.kv_store.kv_store`."""
    if not len(rows):
        return
    tokens, heads, size = rows.shape
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    code = code_of(cache.dtype)
    stored = stored_bytes(cache)
    _store[(tokens, heads)](
        rows,
        stored,
        slot_mapping,
        scales,
        *rows.stride()[:2],
        *stored.stride()[:3],
        *(scales.stride() if scales is not None else (0, 0, 0)),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        BLOCK_SIZE=cache.shape[1],
        CODE=code,
        LIMIT=LARGEST[cache.dtype] if code != PLAIN else 0.0,
        OF_TOKENS=scales_of_tokens,
        num_warps=1,
    )


@kv_store.register_fake
def _(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None,
    scales_of_tokens: bool,
) -> None:
    pass


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    fixed = {"SIZE": 128, "PADDED": 128, "BLOCK_SIZE": 16}
    plain = {**fixed, "CODE": PLAIN, "LIMIT": 0.0, "OF_TOKENS": False, "scales": None}
    yield KernelVariant.of(
        "kv_store bf16", _store, {"rows": "bf16", "cache": "bf16", "slot_mapping": "i64"}, {}, plain, 1
    )
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("int8", torch.int8)):
        constants = {**fixed, "CODE": code_of(dtype), "LIMIT": LARGEST[dtype], "OF_TOKENS": True}
        pointers = {"rows": "bf16", "cache": "u8", "slot_mapping": "i64", "scales": "fp32"}
        yield KernelVariant.of(f"kv_store {kind}", _store, pointers, {}, constants, 1)
