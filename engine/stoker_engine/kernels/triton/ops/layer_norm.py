"""Layer normalisation (`kernels/layer_norm.py` defines it). One program computes a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.common.rows import rows_of, warps_for


@triton.jit
def _layer_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    eps,
    x_outer: tl.int64,
    x_inner: tl.int64,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OF_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_number = dims < SIZE
    of_weights = row % INNER * SIZE + dims if OF_HEADS else dims
    numbers = widened(tl.load(x + row // INNER * x_outer + row % INNER * x_inner + dims, mask=is_number, other=0.0))
    centred = tl.where(is_number, numbers - tl.sum(numbers, 0) / SIZE, 0.0)
    # Division on a GPU is not correctly rounded. Centring again removes the error of the mean, which would dominate the
    # result for large, nearly equal values.
    centred = tl.where(is_number, centred - tl.sum(centred, 0) / SIZE, 0.0)
    normalised = centred * tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    if weight is not None:
        normalised *= widened(tl.load(weight + of_weights, mask=is_number, other=0.0))
    if bias is not None:
        normalised += widened(tl.load(bias + of_weights, mask=is_number, other=0.0))
    tl.store(out + row * SIZE + dims, rounded(normalised, out.dtype.element_ty), mask=is_number)


@operation("stoker::layer_norm")
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `kernels.layer_norm.layer_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_of(x)
    outer, inner, size = rows.shape
    if not out.numel():
        return out
    padded = triton.next_power_of_2(size)
    of_heads = any(each is not None and each.dim() == 2 for each in (weight, bias))
    assert not of_heads or x.dim() == 3
    _layer_norm[(outer * inner,)](
        rows,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        eps,
        *rows.stride()[:2],
        INNER=inner,
        SIZE=size,
        PADDED=padded,
        OF_HEADS=of_heads,
        num_warps=warps_for(padded),
    )
    return out


@layer_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, inner, size, biased, of_heads in (("hidden", 1, 4544, True, False), ("heads", 64, 128, False, True)):
        padded = triton.next_power_of_2(size)
        pointers = dict.fromkeys(("x", "weight", "out"), "bf16") | ({"bias": "bf16"} if biased else {})
        constants: dict[str, object] = {"INNER": inner, "SIZE": size, "PADDED": padded, "OF_HEADS": of_heads}
        constants |= {} if biased else {"bias": None}
        yield KernelVariant.of(
            f"layer_norm {name}", _layer_norm, pointers, {"eps": "fp32"}, constants, warps_for(padded)
        )
