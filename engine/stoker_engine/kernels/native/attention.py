"""Calls attention.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

#: stored_numbers.h's Stored.
_STORED = {
    dtype: code
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
}

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Call(ctypes.Structure):
    """attention.h's AttentionCall."""

    _fields_ = (
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
        ("block_size", _LONG),
        ("tokens", _LONG),
        ("sequences", _LONG),
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("tables", _POINTER),
        ("table_stride", _LONG),
        ("slot_mapping", _POINTER),
    )


@dataclass(frozen=True)
class Step:
    """Where a step's sequences and one group's blocks lie; made once a step, for all layers of the group.

    Attributes:
        words: the call's last fields.
    """

    words: tuple[int, ...]


def step_of(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> Step:
    """The tensors are those of `attention.metadata`, and must live as long as the step."""
    assert query_starts.dtype == seq_lens.dtype == tables.dtype == torch.int32 and slot_mapping.dtype == torch.int64
    assert query_starts.is_contiguous() and seq_lens.is_contiguous() and slot_mapping.is_contiguous()
    assert tables.stride(1) == 1 or tables.shape[1] == 1
    return Step(
        (
            block_size,
            len(slot_mapping),
            len(seq_lens),
            query_starts.data_ptr(),
            seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            slot_mapping.data_ptr(),
        )
    )


def attention(
    library: ctypes.CDLL,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    scales_of_tokens: bool,
    step: Step,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Stores the new keys and values, then attends. Shapes as in `attention.backend`.

    Returns:
        [tokens, heads × value_head_dim].
    """
    tokens, heads, head_dim = query.shape
    kv_heads, value_dim = key_cache.shape[2], value_cache.shape[3]
    out = torch.empty(tokens, heads * value_dim, dtype=query.dtype)
    assert query.dtype == key.dtype and key_cache.dtype == value_cache.dtype
    assert key_cache.dtype in (query.dtype, torch.bfloat16) or (key_scales is not None and value_scales is not None)
    assert query.stride(2) == key.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    assert value is None or (value.dtype == query.dtype and value.stride(2) == 1)
    for each in (alibi_slopes, sinks):
        assert each is None or (each.dtype == torch.float32 and each.is_contiguous() and len(each) == heads)
    call = _Call(
        query.dtype == torch.bfloat16,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        sliding_window or 0,
        scale,
        logits_soft_cap or 0.0,
        None if alibi_slopes is None else alibi_slopes.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        query.data_ptr(),
        *query.stride()[:2],
        key.data_ptr(),
        *key.stride()[:2],
        *((None, 0, 0) if value is None else (value.data_ptr(), *value.stride()[:2])),
        out.data_ptr(),
        _STORED[key_cache.dtype],
        key_cache.data_ptr(),
        *key_cache.stride()[:3],
        value_cache.data_ptr(),
        *value_cache.stride()[:3],
        scales_of_tokens,
        *_place(key_scales),
        *_place(value_scales),
        *step.words,
    )
    library.stoker_attention(ctypes.byref(call))
    return out


def _place(scales: torch.Tensor | None) -> tuple[int | None, int, int, int]:
    """Where scales [blocks, block_size, kv_heads] lie, and their strides."""
    if scales is None:
        return None, 0, 0, 0
    assert scales.dtype == torch.float32
    block, slot, head = scales.stride()
    return scales.data_ptr(), block, slot, head
