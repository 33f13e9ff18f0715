"""Calls layer.cpp: a decoder's layer as one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker_engine.kernels.native.attention import AttentionCall, AttentionOf, AttentionStep
from stoker_engine.kernels.native.matrix import Matrix, NativeProduct

_POINTER, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double

#: (x [tokens, hidden], the step, cos and sin [tokens, 1, pairs] or None, rows int64 or None) → see `WholeLayer`.
RunLayer = Callable[
    [torch.Tensor, AttentionStep, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("is_wide", _LONG), ("eps", _DOUBLE))


class _Layer(ctypes.Structure):
    """layer.cpp's Layer."""

    _fields_ = (
        ("is_bf16", _LONG),
        ("hidden", _LONG),
        ("multiplier", _FLOAT),
        *((f"{name}_norm", _Norm) for name in ("input", "q", "k", "post_attention", "pre_mlp", "post_mlp")),
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        *((name, _LONG) for name in ("pairs", "interleaved", "activation", "gated")),
        ("attention", AttentionCall),
    )


@dataclass(frozen=True, eq=False)
class NormOf:
    """A norm by root mean square: its weight [size], see `kernels.rms_norm` for the dtype, and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class LayerOf:
    """What a layer is computed from. Its norms may be None.

    Attributes:
        multiplier: attention's and the MLP's results are multiplied by it.
        pairs: that are turned in each head; 0: none.
        activation: a kind of `kernels.native.activation`.
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
    qkv: NativeProduct
    out: NativeProduct
    up: NativeProduct
    down: NativeProduct
    pairs: int
    interleaved: bool
    activation: int
    gated: bool
    attention: AttentionOf


def layer(library: ctypes.CDLL, of: LayerOf) -> RunLayer:
    """The layer as one call, with the bits of its operations one by one. Tensors must stay where they are."""
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
    function, pointer = library.stoker_layer, ctypes.addressof(call)

    # The structure and the tensors are kept with their addresses.
    def run(
        x: torch.Tensor,
        step: AttentionStep,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        rows: torch.Tensor | None,
        _: object = (call, of),
    ) -> torch.Tensor:
        assert x.dtype == of.dtype and x.is_contiguous() and x.shape == (step.tokens, of.hidden)
        turned: tuple[int | None, int | None] = None, None
        if cos is None or sin is None:
            assert of.pairs == 0
        else:
            assert cos.shape[-1] == of.pairs and cos.is_contiguous() and sin.is_contiguous() and cos.dtype == x.dtype
            turned = cos.data_ptr(), sin.data_ptr()
        if rows is None:
            function(pointer, ctypes.addressof(step), x.data_ptr(), *turned, None, -1, x.data_ptr())
            return x
        assert rows.dtype == torch.int64 and rows.is_contiguous()
        out = torch.empty((len(rows), of.hidden), dtype=x.dtype)
        function(pointer, ctypes.addressof(step), x.data_ptr(), *turned, rows.data_ptr(), len(rows), out.data_ptr())
        return out

    return run


def _norm(of: NormOf | None) -> _Norm:
    if of is None:
        return _Norm()
    assert of.weight.is_contiguous()
    return _Norm(of.weight.data_ptr(), of.weight.dtype == torch.float32, of.eps)
