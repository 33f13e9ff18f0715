"""Root-mean-square normalisation (`kernels/rms_norm.py` defines it): a program has a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.arithmetic import rounded, widened
from stoker_engine.kernels.triton.rows import rows_of, warps_for
from stoker_engine.kernels.triton.specimen import Specimen


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    eps,
    x_outer: tl.int64,
    x_inner: tl.int64,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_number = dims < SIZE
    DTYPE: tl.constexpr = out.dtype.element_ty
    numbers = widened(tl.load(x + row // INNER * x_outer + row % INNER * x_inner + dims, mask=is_number, other=0.0))
    scale = widened(tl.load(weight + dims, mask=is_number, other=0.0))
    normalised = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if weight.dtype.element_ty != tl.float32:
        normalised = widened(rounded(normalised, DTYPE))
    tl.store(out + row * SIZE + dims, rounded(normalised * scale, DTYPE), mask=is_number)


@torch.library.custom_op("stoker::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_of(x)
    outer, inner, size = rows.shape
    if not out.numel():
        return out
    padded = triton.next_power_of_2(size)
    _rms_norm[(outer * inner,)](
        rows, weight, out, eps, *rows.stride()[:2], INNER=inner, SIZE=size, PADDED=padded, num_warps=warps_for(padded)
    )
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def specimens(is_amd: bool) -> Iterator[Specimen]:
    """See `attention.specimens`."""
    for name, inner, size, weight in (
        ("hidden", 1, 8192, "bf16"),
        ("heads", 32, 128, "bf16"),
        ("wide", 1, 640, "fp32"),
    ):
        padded = triton.next_power_of_2(size)
        yield Specimen.of(
            f"rms_norm {name}",
            _rms_norm,
            {"x": "bf16", "weight": weight, "out": "bf16"},
            {"eps": "fp32"},
            {"INNER": inner, "SIZE": size, "PADDED": padded},
            warps_for(padded),
        )
