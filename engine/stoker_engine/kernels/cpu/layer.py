"""Binding of layer.cpp: a decoder's layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stoker_engine.kernels.cpu.attention import AttentionCall, AttentionOf, AttentionStep
from stoker_engine.kernels.cpu.matrix import CpuLinear, Matrix

_POINTER, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double

#: Largest number of tokens for which all layers are one call. With more tokens each layer is a call of its own, so that
#: Python can handle signals in between.
_AT_ONCE: Final = 64

#: (x [tokens, hidden], step by KV cache group, cos and sin [tokens, 1, pairs] by kind of RoPE, indices of the kept
#: tokens int64 or None, input-batch rows of the tokens and of the kept tokens, int64 or None) → see `WholeLayers` in
#: `attention.backend`.
RunLayers = Callable[
    [
        torch.Tensor,
        "ctypes.Array[AttentionStep]",
        Sequence[tuple[torch.Tensor, torch.Tensor]],
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
    ],
    torch.Tensor,
]


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("is_wide", _LONG), ("eps", _DOUBLE))


class _Layer(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        ("is_bf16", _LONG),
        ("hidden", _LONG),
        ("multiplier", _FLOAT),
        *((f"{name}_norm", _Norm) for name in ("input", "q", "k", "post_attention", "pre_mlp", "post_mlp")),
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        *((name, _LONG) for name in ("pairs", "interleaved", "activation", "gated")),
        ("attention", AttentionCall),
    )


class _LayerEntry(ctypes.Structure):
    _fields_ = (("layer", _POINTER), ("group", _LONG), ("cos_sin", _LONG))


class _RopeCosSin(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER))


@dataclass(frozen=True, eq=False)
class NormOf:
    """An RMS norm: weight [size] (for its dtype see `kernels.rms_norm`) and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class LayerOf:
    """Weights and parameters of a layer. Norms are None if the layer does not have them.

    Attributes:
        multiplier: factor of the results of attention and of the MLP.
        pairs: rotated pairs in each head; 0: no rotation.
        cos_sin: index of the kind of RoPE; None: no rotation.
        group: see `attention.backend.KVCache`.
        activation: kind in `kernels.cpu.activation`.
    """

    dtype: torch.dtype
    hidden: int
    multiplier: float
    input_norm: NormOf | None
    q_norm: NormOf | None
    k_norm: NormOf | None
    post_attention_norm: NormOf | None
    pre_mlp_norm: NormOf | None
    post_mlp_norm: NormOf | None
    qkv: CpuLinear
    out: CpuLinear
    up: CpuLinear
    down: CpuLinear
    pairs: int
    interleaved: bool
    activation: int
    gated: bool
    attention: AttentionOf
    cos_sin: int | None
    group: int


def layers(library: ctypes.CDLL, of: Sequence[LayerOf]) -> RunLayers:
    """Return the operation of consecutive layers, bit-identical to the layers' separate operations. Weights and caches
    must keep their addresses."""
    calls = [_layer(each) for each in of]
    dtype, hidden, count = of[0].dtype, of[0].hidden, len(of)
    assert all((each.dtype, each.hidden) == (dtype, hidden) for each in of)
    groups = {each.group for each in of}
    pairs = {each.cos_sin: each.pairs for each in of if each.cos_sin is not None}
    assert all(pairs[each.cos_sin] == each.pairs if each.cos_sin is not None else each.pairs == 0 for each in of)
    entries = (_LayerEntry * count)(
        *(
            _LayerEntry(ctypes.addressof(call), each.group, -1 if each.cos_sin is None else each.cos_sin)
            for call, each in zip(calls, of, strict=True)
        )
    )
    function, pointer, size = library.stoker_layers, ctypes.addressof(entries), ctypes.sizeof(_LayerEntry)

    # The default argument keeps the structures and tensors alive, since C++ has only their addresses.
    def run(
        x: torch.Tensor,
        steps: ctypes.Array[AttentionStep],
        cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor | None,
        batch_rows: torch.Tensor | None,
        kept_batch_rows: torch.Tensor | None,
        _: object = (calls, entries, of),
    ) -> torch.Tensor:
        tokens = len(x)
        assert x.dtype == dtype and x.is_contiguous() and x.shape[1] == hidden
        assert all(steps[group].tokens == tokens for group in groups)
        for kind, num_pairs in pairs.items():
            cos, sin = cos_sin[kind]
            assert cos.shape == sin.shape == (tokens, 1, num_pairs) and cos.dtype == sin.dtype == dtype
            assert cos.is_contiguous() and sin.is_contiguous()
        rotated = (_RopeCosSin * len(cos_sin))(*(_RopeCosSin(cos.data_ptr(), sin.data_ptr()) for cos, sin in cos_sin))
        of_tokens = _row_numbers(batch_rows, tokens)
        arguments = ctypes.addressof(steps), ctypes.addressof(rotated), x.data_ptr(), of_tokens
        all_rows = None, -1, None, None
        address, remaining = pointer, count
        while tokens > _AT_ONCE and remaining > 1:
            function(address, 1, *arguments, *all_rows)
            address, remaining = address + size, remaining - 1
        if rows is None:
            function(address, remaining, *arguments, *all_rows)
            return x
        out = torch.empty((len(rows), hidden), dtype=dtype)
        of_kept = _row_numbers(kept_batch_rows, len(rows))
        kept = _row_numbers(rows, len(rows)), len(rows), out.data_ptr(), of_kept
        function(address, remaining, *arguments, *kept)
        return out

    return run


def _layer(of: LayerOf) -> _Layer:
    call = _Layer(is_bf16=of.dtype == torch.bfloat16, hidden=of.hidden, multiplier=of.multiplier)
    call.input_norm, call.q_norm, call.k_norm = _norm(of.input_norm), _norm(of.q_norm), _norm(of.k_norm)
    call.post_attention_norm = _norm(of.post_attention_norm)
    call.pre_mlp_norm, call.post_mlp_norm = _norm(of.pre_mlp_norm), _norm(of.post_mlp_norm)
    call.qkv, call.out, call.up, call.down = of.qkv.matrix, of.out.matrix, of.up.matrix, of.down.matrix
    call.pairs, call.interleaved, call.activation, call.gated = of.pairs, of.interleaved, of.activation, of.gated
    call.attention = of.attention.call(of.dtype)
    heads = call.attention.heads + 2 * call.attention.kv_heads
    assert call.qkv.outputs == heads * call.attention.head_dim and call.attention.value_dim == call.attention.head_dim
    assert call.qkv.inner == call.out.outputs == call.up.inner == call.down.outputs == of.hidden
    assert call.out.inner == call.attention.heads * call.attention.value_dim
    assert call.up.outputs == call.down.inner * (1 + of.gated)
    return call


def _row_numbers(rows: torch.Tensor | None, count: int) -> int | None:
    """Return the address of `count` row indices."""
    if rows is None:
        return None
    assert rows.shape == (count,) and rows.dtype == torch.int64 and rows.is_contiguous()
    return rows.data_ptr()


def _norm(of: NormOf | None) -> _Norm:
    if of is None:
        return _Norm()
    assert of.weight.is_contiguous()
    return _Norm(of.weight.data_ptr(), of.weight.dtype == torch.float32, of.eps)
