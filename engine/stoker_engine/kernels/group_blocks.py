"""Weights in groups that share a scale: a row's scales, zero points and codes in contiguous bytes.

    a row     │ r │ s s … s │ z z … z │ c c … c │        w = r × s × (value of c - z)

    r    scale of the row, float32, if the format has one
    s    scale of each group, of type `GroupFormat.scale`
    z    zero point of each group, a byte, if the format has them; otherwise 2^(bits - 1) for unsigned integers, and 0
         for other codes
    c    codes in units of 32 elements, n(0) … n(31). The last unit of a row is padded with codes of 0.

         8 bits   a byte for each
         4 bits   16 bytes; byte i has n(i) in its low half and n(i + 16) in its high half
         2 bits   8 bytes; byte i has n(i), n(i + 8), n(i + 16), n(i + 24), from its low bits up
         3 bits   12 bytes: the two low bits of each as above, then 4 bytes whose bit i, from the low one up, is the
                  high bit of n(i)

Codes are integers, OCP's FP8 (Micikevicius et al., 2022), FP4 (e2m1, sign in the high bit), or indices of nf4's 16
quantiles (QLoRA, Dettmers et al., 2023).

Everything is little-endian. Elements are computed in float32, where each × rounds and - is exact, then rounded to the
requested dtype.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from stoker_engine.architectures.stored_formats import UNIT, Code, GroupFormat, Scale

#: Dtypes of stored scales.
SCALE_DTYPES: Final[dict[Scale, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e8m0": torch.float8_e8m0fnu,
    "fp8_e4m3": torch.float8_e4m3fn,
}

_FP8: Final[dict[Code, torch.dtype]] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Parts(NamedTuple):
    """Parts of a matrix in groups, with `inner` elements and `groups` groups in a row.

    Attributes:
        codes: uint8 [..., inner].
        scales: float32 [..., groups], multiplied by the row's scale.
        zeros: float32 [..., groups], implied for formats without zero points.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


@functools.cache
def values(code: Code) -> torch.Tensor:
    """Return the value of each code before the zero point is subtracted, float32 [2^bits]. Do not modify the result,
    which is cached."""
    if code in _FP8:
        return torch.arange(256, dtype=torch.uint8).view(_FP8[code]).float()
    if code == "fp4":
        return torch.tensor([*_FP4, *(-each for each in _FP4)])
    if code == "nf4":
        return torch.tensor(_NF4)
    if code == "int8":
        return torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
    return torch.arange(1 << GroupFormat(code, 0, "float32").bits).float()


def implied_zero(code: Code) -> int:
    """Return the zero point of groups in formats that store none."""
    return 1 << (GroupFormat(code, 0, "float32").bits - 1) if code.startswith("uint") else 0


def encode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    format: GroupFormat,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode a matrix in `format`: uint8 [..., format.row_bytes(inner)].

    Args:
        codes: [..., inner], one byte each (uint8, int8, float8), below 2^bits.
        scales: [..., groups], values that the stored dtype can represent; or uint8, the stored bytes of one-byte
            scales.
        zeros: uint8 [..., groups] if the format has zero points, else None.
        row_scales: float32 [...] if the format has row scales, else None.
    """
    inner = codes.shape[-1]
    assert codes.itemsize == 1 and scales.shape == (*codes.shape[:-1], format.groups(inner))
    assert (zeros is not None) == format.zero and (row_scales is not None) == format.row_scale
    parts = []
    if row_scales is not None:
        parts.append(_bytes(row_scales.float().unsqueeze(-1)))
    parts.append(scales if scales.dtype == torch.uint8 else _bytes(scales.to(SCALE_DTYPES[format.scale])))
    if zeros is not None:
        assert zeros.dtype == torch.uint8 and zeros.shape == scales.shape
        parts.append(zeros)
    padded = functional.pad(codes.view(torch.uint8), (0, -inner % UNIT))
    parts.append(_pack(padded.unflatten(-1, (-1, UNIT)), format.bits).flatten(-2))
    blocks = torch.cat(parts, dim=-1)
    assert blocks.shape[-1] == format.row_bytes(inner)
    return blocks


def decode(blocks: torch.Tensor, format: GroupFormat, inner: int) -> Parts:
    """Decode uint8 [..., row_bytes] into its parts."""
    scales, zeros, codes = _split(blocks, format, inner)
    return Parts(unpack(codes, format)[..., :inner], scales, zeros)


def unpack(packed: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Unpack the codes of uint8 [..., bytes of a row's codes] → uint8 [..., elements of whole units]."""
    return _unpack(packed.unflatten(-1, (-1, UNIT * format.bits // 8)), format.bits).flatten(-2)


def _split(blocks: torch.Tensor, format: GroupFormat, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales and zero points as in `Parts`, and the packed codes."""
    assert blocks.dtype == torch.uint8 and blocks.shape[-1] == format.row_bytes(inner)
    groups, width = format.groups(inner), SCALE_DTYPES[format.scale].itemsize
    sizes = (4 * format.row_scale, groups * width, groups * format.zero)
    row_scales, scales, zeros, codes = blocks.split((*sizes, blocks.shape[-1] - sum(sizes)), dim=-1)
    scale_values = _as(scales, SCALE_DTYPES[format.scale]).float()
    if format.row_scale:
        scale_values = _as(row_scales, torch.float32) * scale_values
    return (
        scale_values,
        zeros.float() if format.zero else torch.full_like(scale_values, implied_zero(format.code)),
        codes,
    )


def dequantize(blocks: torch.Tensor, format: GroupFormat, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize uint8 [..., row_bytes] → [..., inner] in `dtype`."""
    codes, scales, zeros = decode(blocks, format, inner)
    code_values = values(format.code).to(blocks.device)[codes.int()]
    if (format := format.for_rows(inner)).group:
        scales, zeros = (each.repeat_interleave(format.group, dim=-1)[..., :inner] for each in (scales, zeros))
    return (scales * (code_values - zeros)).to(dtype)


def is_finite(blocks: torch.Tensor, format: GroupFormat, inner: int) -> bool:
    """Whether all scales and codes are finite, and no element can overflow in bfloat16. The CPU kernels rely on this.
    Needs a few MB of temporary memory."""
    if blocks.dim() > 2:
        return all(is_finite(each, format, inner) for each in blocks)
    if not blocks.numel():
        return True
    code_values = values(format.code)
    finite_values = code_values[code_values.isfinite()]
    limit = torch.finfo(torch.bfloat16).max
    for rows in blocks.split(max(1, (1 << 20) // blocks.shape[-1])):
        scales, zeros, codes = _split(rows, format, inner)
        largest = torch.maximum(finite_values.max().item() - zeros, zeros - finite_values.min().item())
        if not bool((scales.abs() * largest <= limit).all()):
            return False
        # For each sign the non-finite codes are the largest bytes.
        if format.code in _FP8 and bool((codes[..., :inner] & 0x7F).max() >= len(finite_values) // 2):
            return False
    return True


def quantize(weights: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Quantize `weights` [..., inner] (finite, any floating dtype) to the nearest in `format`: uint8 [..., row_bytes].

    Scales are rounded to their stored dtype before codes are chosen. A group of zeros has a scale of 0, or the smallest
    that the dtype can represent.

        integers with zero point        the range is min(smallest element, 0) to max(largest element, 0)
        8-bit integers without it       the largest magnitude becomes 127
        integers of fewer bits without  the largest magnitude becomes 2^(bits - 1) - 1, or -2^(bits - 1) with a scale
                                        that may be negative (as in ggml; not for e8m0), whichever has the smaller
                                        squared error
        other codes                     the largest magnitude becomes the code's largest value
        scales in e8m0                  rounded up to a power of two
        row scales                      the largest group scale of the row becomes 1; 448 for fp8_e4m3
    """
    inner, rows = weights.shape[-1], weights.reshape(-1, weights.shape[-1])
    out = torch.empty(len(rows), format.row_bytes(inner), dtype=torch.uint8, device=weights.device)
    step = max(1, (1 << 22) // max(1, inner))  # limits temporary memory to a few times as many elements
    for start in range(0, len(rows), step):
        out[start : start + step] = _quantize(rows[start : start + step].float(), format)
    return out.view(*weights.shape[:-1], -1)


class _Rounded(NamedTuple):
    """Quantized groups [rows, groups, size]."""

    codes: torch.Tensor  # [rows, groups, size]
    stored: torch.Tensor  # scales [rows, groups], in the stored dtype
    zeros: torch.Tensor  # [rows, groups]
    scales: torch.Tensor  # float32 [rows, groups], multiplied by the row's scale


def _quantize(weights: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    inner = weights.shape[-1]
    size = format.for_rows(inner).group or inner
    grouped = functional.pad(weights, (0, -inner % size)).unflatten(-1, (-1, size))
    exact_scales = _candidate_scales(grouped, format)
    row_scales = None
    if format.row_scale:
        row_scales = _divided(exact_scales[0].abs().amax(-1), 448.0 if format.scale == "fp8_e4m3" else 1.0)
    best, *alternatives = (_rounded(grouped, each, row_scales, format) for each in exact_scales)
    for alternative in alternatives:
        better = _error(alternative, grouped, format) < _error(best, grouped, format)
        codes = torch.where(better.unsqueeze(-1), alternative.codes, best.codes)
        stored = torch.where(better, alternative.stored.float(), best.stored.float()).to(best.stored.dtype)
        best = _Rounded(codes, stored, best.zeros, torch.where(better, alternative.scales, best.scales))
    zeros = best.zeros.to(torch.uint8) if format.zero else None
    return encode(best.codes.flatten(-2)[..., :inner], best.stored, zeros, format, row_scales)


def _candidate_scales(grouped: torch.Tensor, format: GroupFormat) -> list[torch.Tensor]:
    """Return candidates of the scales [rows, groups], not yet rounded."""
    largest = grouped.amax(-1)
    if format.zero:
        return [_divided(largest.clamp(min=0) - grouped.amin(-1).clamp(max=0), 2**format.bits - 1)]
    magnitude = grouped.abs().amax(-1)
    scales = [_divided(magnitude, _largest_value(format))]
    if format.code.startswith("uint") and format.bits < 8:
        sign = -1.0 if format.scale != "e8m0" else 1.0
        scales.append(torch.where(largest == magnitude, sign, 1.0) * magnitude / 2 ** (format.bits - 1))
    return scales


def _divided(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide by a number, rounded to the nearest on every device: on GPUs torch would multiply by the rounded
    reciprocal of a number that is not in their memory."""
    return values / torch.full((), divisor, device=values.device)


def _rounded(
    grouped: torch.Tensor, exact_scales: torch.Tensor, row_scales: torch.Tensor | None, format: GroupFormat
) -> _Rounded:
    if row_scales is None:
        stored = _stored_scales(exact_scales, format)
        scales = stored.float()
    else:
        stored = _stored_scales(_quotient(exact_scales, row_scales.unsqueeze(-1)), format)
        scales = row_scales.unsqueeze(-1) * stored.float()
    if format.zero:
        zeros = _quotient(-grouped.amin(-1).clamp(max=0), scales).round().clamp(0, 2**format.bits - 1)
    else:
        zeros = torch.full_like(scales, implied_zero(format.code))
    codes = _nearest(_quotient(grouped, scales.unsqueeze(-1)), zeros.unsqueeze(-1), format)
    return _Rounded(codes, stored, zeros, scales)


def _error(rounded: _Rounded, grouped: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return the squared error of each group."""
    code_values = values(format.code).to(grouped.device)[rounded.codes.int()] - rounded.zeros.unsqueeze(-1)
    return (rounded.scales.unsqueeze(-1) * code_values - grouped).square().sum(-1)


@functools.cache
def _largest_value(format: GroupFormat) -> float:
    finite = values(format.code)
    return float(finite[finite.isfinite()].max()) - implied_zero(format.code)


def _stored_scales(scales: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Convert scales to their stored dtype; those that are too large are clamped."""
    dtype = SCALE_DTYPES[format.scale]
    if format.scale == "e8m0":
        fraction, exponent = torch.frexp(scales)
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, 127)
        return (exponent + 127).to(torch.uint8).view(dtype)
    return scales.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def _quotient(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide by scales; the result is 0 where the scale is 0."""
    return torch.where(scales == 0, 0.0, values / torch.where(scales == 0, 1.0, scales))


def _nearest(scaled: torch.Tensor, zeros: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return the codes (uint8) whose values minus the zero points are nearest to `scaled`."""
    if format.code in _FP8:
        largest = _largest_value(format)
        return _bytes(scaled.clamp(-largest, largest).to(_FP8[format.code]))
    if format.code in ("fp4", "nf4"):
        ordered, order = values(format.code).to(scaled.device).sort()
        return order.to(torch.uint8)[torch.bucketize(scaled, (ordered[1:] + ordered[:-1]) / 2)]
    if format.code == "int8":
        return _bytes(scaled.round().clamp(-128, 127).to(torch.int8))
    return (scaled.round() + zeros).clamp(0, 2**format.bits - 1).to(torch.uint8)


def _as(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret uint8 [..., n] as `dtype`. Copies, since a single row of a matrix counts as contiguous but keeps the
    matrix's stride."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _pack(units: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, uint8 [..., 32] → [..., 4 × bits]."""
    if bits == 8:
        return units
    if bits == 4:
        return units[..., :16] | units[..., 16:] << 4
    # The shifted codes have no bits in common, so the sum is their union.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=units.device).unsqueeze(-1)
    low = (units & 3).unflatten(-1, (4, 8)) << shifts
    packed: torch.Tensor = low.sum(-2, dtype=torch.uint8)
    if bits == 3:
        high = (units >> 2).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=units.device)
        packed = torch.cat([packed, high.sum(-1, dtype=torch.uint8)], dim=-1)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes, the inverse of `_pack`."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.cat([packed & 15, packed >> 4], dim=-1)
    low = torch.cat([packed[..., :8] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    if bits == 2:
        return low
    high = packed[..., 8:].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return torch.bitwise_or(low, (high & 1).flatten(-2) << 2)
