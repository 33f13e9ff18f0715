"""RMS normalisation (`kernels/rms_norm.py` defines it). One program computes a row."""

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
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    added,
    weight,
    total,
    out,
    eps,
    x_outer: tl.int64,
    x_inner: tl.int64,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_number = dims < SIZE
    DTYPE: tl.constexpr = out.dtype.element_ty
    numbers = widened(tl.load(x + row // INNER * x_outer + row % INNER * x_inner + dims, mask=is_number, other=0.0))
    if ADDS:
        summed = rounded(numbers + widened(tl.load(added + row * SIZE + dims, mask=is_number, other=0.0)), DTYPE)
        tl.store(total + row * SIZE + dims, summed, mask=is_number)
        numbers = widened(summed)
    scale = widened(tl.load(weight + dims, mask=is_number, other=0.0))
    normalised = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if weight.dtype.element_ty != tl.float32:
        normalised = widened(rounded(normalised, DTYPE))
    tl.store(out + row * SIZE + dims, rounded(normalised * scale, DTYPE), mask=is_number)


@operation("stoker::rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation("stoker::add_rms_norm")
def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rms_norm.after_sum`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, added.contiguous(), weight, total, out, eps)
    return total, out


@add_rms_norm.register_fake
def _(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    rows = rows_of(x)
    outer, inner, size = rows.shape
    if not out.numel():
        return
    padded = triton.next_power_of_2(size)
    _rms_norm[(outer * inner,)](
        rows,
        added,
        weight,
        total,
        out,
        eps,
        *rows.stride()[:2],
        INNER=inner,
        SIZE=size,
        PADDED=padded,
        ADDS=added is not None,
        num_warps=warps_for(padded),
    )


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.kernel_variants`."""
    for name, inner, size, weight, adds in (
        ("hidden", 1, 8192, "bf16", False),
        ("heads", 32, 128, "bf16", False),
        ("wide", 1, 640, "fp32", False),
        ("after a sum", 1, 8192, "bf16", True),
    ):
        padded = triton.next_power_of_2(size)
        pointers = {"x": "bf16", "weight": weight, "out": "bf16"}
        constants: dict[str, object] = {"INNER": inner, "SIZE": size, "PADDED": padded, "ADDS": adds}
        if adds:
            pointers |= {"added": "bf16", "total": "bf16"}
        else:
            constants |= {"added": None, "total": None}
        yield KernelVariant.of(f"rms_norm {name}", _rms_norm, pointers, {"eps": "fp32"}, constants, warps_for(padded))
