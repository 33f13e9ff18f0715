"""Binding of attention.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

#: `Stored` of kv_dtypes.h.
_STORED = {
    dtype: code
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
}

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class AttentionStep(ctypes.Structure):
    """`AttentionStep` of attention.h."""

    _fields_ = (
        ("block_size", _LONG),
        ("tokens", _LONG),
        ("sequences", _LONG),
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("tables", _POINTER),
        ("table_stride", _LONG),
        ("slot_mapping", _POINTER),
    )


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of attention.h."""

    _fields_ = (
        ("step", AttentionStep),
        *((name, _LONG) for name in ("is_bf16", "heads", "kv_heads", "head_dim", "value_dim", "window")),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
        ("alibi_slopes", _POINTER),
        ("sinks", _POINTER),
        ("query", _POINTER),
        ("query_token", _LONG),
        ("query_head", _LONG),
        ("new_keys", _POINTER),
        ("new_key_token", _LONG),
        ("new_key_head", _LONG),
        ("new_values", _POINTER),
        ("new_value_token", _LONG),
        ("new_value_head", _LONG),
        ("out", _POINTER),
        ("stored", _LONG),
        ("keys", _POINTER),
        ("key_block", _LONG),
        ("key_slot", _LONG),
        ("key_head", _LONG),
        ("values", _POINTER),
        ("value_block", _LONG),
        ("value_slot", _LONG),
        ("value_head", _LONG),
        ("scales_of_tokens", _LONG),
        ("key_scales", _POINTER),
        ("key_scale_block", _LONG),
        ("key_scale_slot", _LONG),
        ("key_scale_head", _LONG),
        ("value_scales", _POINTER),
        ("value_scale_block", _LONG),
        ("value_scale_slot", _LONG),
        ("value_scale_head", _LONG),
    )


def step_of(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> AttentionStep:
    """Return the description of a step's sequences and of one group's block tables, shared by all layers of the group.
    The tensors are those of `attention.metadata`, and must outlive the step."""
    assert query_starts.dtype == seq_lens.dtype == tables.dtype == torch.int32 and slot_mapping.dtype == torch.int64
    assert query_starts.is_contiguous() and seq_lens.is_contiguous() and slot_mapping.is_contiguous()
    assert tables.stride(1) == 1 or tables.shape[1] == 1
    return AttentionStep(
        block_size,
        len(slot_mapping),
        len(seq_lens),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        slot_mapping.data_ptr(),
    )


@dataclass(frozen=True, eq=False)
class AttentionOf:
    """Constants of a layer's attention; see `attention.backend`.

    Attributes:
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim or value_head_dim].
        key_scales, value_scales: [blocks, block_size, kv_heads] float32, or None.
        scales_of_tokens: whether scales are computed when tokens are stored.
        alibi_slopes, sinks: [heads] float32, or None.
    """

    heads: int
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    scales_of_tokens: bool
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    def call(self, dtype: torch.dtype) -> AttentionCall:
        """Return a call for queries of `dtype`, without the step and the addresses of inputs and output."""
        key_cache, value_cache = self.key_cache, self.value_cache
        kv_heads, head_dim = key_cache.shape[2:]
        has_scales = self.key_scales is not None and self.value_scales is not None
        assert key_cache.dtype == value_cache.dtype
        assert key_cache.dtype in (dtype, torch.bfloat16) or has_scales
        assert key_cache.stride(3) == value_cache.stride(3) == 1
        for each in (self.alibi_slopes, self.sinks):
            assert each is None or (each.dtype == torch.float32 and each.is_contiguous() and len(each) == self.heads)
        call = AttentionCall()
        call.is_bf16 = dtype == torch.bfloat16
        call.heads, call.kv_heads, call.head_dim, call.value_dim = self.heads, kv_heads, head_dim, value_cache.shape[3]
        call.window, call.scale, call.soft_cap = self.sliding_window or 0, self.scale, self.logits_soft_cap or 0.0
        call.alibi_slopes = None if self.alibi_slopes is None else self.alibi_slopes.data_ptr()
        call.sinks = None if self.sinks is None else self.sinks.data_ptr()
        call.stored, call.scales_of_tokens = _STORED[key_cache.dtype], self.scales_of_tokens
        call.keys, (call.key_block, call.key_slot, call.key_head) = key_cache.data_ptr(), key_cache.stride()[:3]
        call.values, (call.value_block, call.value_slot, call.value_head) = (
            value_cache.data_ptr(),
            value_cache.stride()[:3],
        )
        if self.key_scales is not None and self.value_scales is not None:
            assert self.key_scales.dtype == self.value_scales.dtype == torch.float32
            call.key_scales, strides = self.key_scales.data_ptr(), self.key_scales.stride()
            call.key_scale_block, call.key_scale_slot, call.key_scale_head = strides
            call.value_scales, strides = self.value_scales.data_ptr(), self.value_scales.stride()
            call.value_scale_block, call.value_scale_slot, call.value_scale_head = strides
        return call


def attention(
    library: ctypes.CDLL,
    of: AttentionOf,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    step: AttentionStep,
) -> torch.Tensor:
    """Store the new keys and values, then compute attention. For shapes see `attention.backend`.

    Returns:
        [tokens, heads × value_head_dim].
    """
    call = of.call(query.dtype)
    out = torch.empty(len(query), of.heads * call.value_dim, dtype=query.dtype)
    assert query.shape[1:] == (of.heads, call.head_dim) and query.dtype == key.dtype
    assert query.stride(2) == key.stride(2) == 1
    assert value is None or (value.dtype == query.dtype and value.stride(2) == 1)
    call.step = step
    call.query, (call.query_token, call.query_head) = query.data_ptr(), query.stride()[:2]
    call.new_keys, (call.new_key_token, call.new_key_head) = key.data_ptr(), key.stride()[:2]
    if value is not None:
        call.new_values, (call.new_value_token, call.new_value_head) = value.data_ptr(), value.stride()[:2]
    call.out = out.data_ptr()
    library.stoker_attention(ctypes.byref(call))
    return out
