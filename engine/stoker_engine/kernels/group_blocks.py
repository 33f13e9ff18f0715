"""Weights in groups that share a scale: a row's scales, zero points and codes in one run of bytes.

    a row     │ r │ s s … s │ z z … z │ c c … c │        w = r × s × (value of c - z)

    r    the row's own scale, a float32, where the format has one
    s    the scale of each group, as `GroupFormat.scale` says
    z    the zero point of each group, a byte, where the format has them; without, codes of unsigned integers mean
         c - 2^(bits - 1), and all others what they are
    c    the codes in units of 32 elements, n(0) … n(31). The last unit of a row is filled up with codes of 0.

         8 bits   a byte each
         4 bits   16 bytes; byte i has n(i) in its low half and n(i + 16) in its high half
         2 bits   8 bytes; byte i has n(i), n(i + 8), n(i + 16), n(i + 24), from its low bits up
         3 bits   12 bytes: the two low bits of each as above, then 4 bytes whose bit i, from the low one up, is the
                  high bit of n(i)

The value of a code: of integers themselves; OCP's FP8 (Micikevicius et al., 2022) and FP4 (e2m1, its high bit the
sign); of nf4 the 16 quantiles of QLoRA (Dettmers et al., 2023).

Everything is little-endian. Elements are computed in float32, one rounding for each × and none for -, then rounded to
the wanted dtype.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from stoker_engine.architectures.stored_formats import UNIT, Code, GroupFormat, Scale

#: What scales are stored as.
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
    """What a matrix in groups consists of, for `inner` numbers and `groups` groups in a row.

    Attributes:
        codes: uint8 [..., inner].
        scales: float32 [..., groups], the row's own scale multiplied in.
        zeros: float32 [..., groups], of formats without zero points as well.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


@functools.cache
def values(code: Code) -> torch.Tensor:
    """float32 [2^bits]: what each code means, before a zero point is subtracted. Not to be written to."""
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
    """The zero point of groups that have none of their own."""
    return 1 << (GroupFormat(code, 0, "float32").bits - 1) if code.startswith("uint") else 0


def encode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    format: GroupFormat,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """A matrix in `format`: uint8 [..., format.row_bytes(inner)].

    Args:
        codes: [..., inner], a byte each (uint8, int8, float8), below 2^bits.
        scales: [..., groups], of the dtype they are stored as or of another that it holds; uint8 are bytes as they are
            stored, where a scale is a byte.
        zeros: uint8 [..., groups], exactly where the format has zero points.
        row_scales: float32 [...], exactly where the format has them.
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
    """What uint8 [..., row_bytes] consist of."""
    scales, zeros, codes = _split(blocks, format, inner)
    unpacked = _unpack(codes.unflatten(-1, (-1, UNIT * format.bits // 8)), format.bits).flatten(-2)[..., :inner]
    return Parts(unpacked, scales, zeros)


def _split(blocks: torch.Tensor, format: GroupFormat, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points as of `Parts`, and the codes as they are packed."""
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
    """uint8 [..., row_bytes] → [..., inner] in `dtype`."""
    codes, scales, zeros = decode(blocks, format, inner)
    code_values = values(format.code).to(blocks.device)[codes.int()]
    if (format := format.for_rows(inner)).group:
        scales, zeros = (each.repeat_interleave(format.group, dim=-1)[..., :inner] for each in (scales, zeros))
    return (scales * (code_values - zeros)).to(dtype)


def is_finite(blocks: torch.Tensor, format: GroupFormat, inner: int) -> bool:
    """Whether no scale and no code stands for what is no number, and none can become one when they are multiplied and
    rounded to bfloat16: what the CPU's kernels rely on. Takes a few MB meanwhile."""
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
        # Of each sign the largest bytes are those that are no numbers.
        if format.code in _FP8 and bool((codes[..., :inner] & 0x7F).max() >= len(finite_values) // 2):
            return False
    return True


def quantize(weights: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Weights [..., inner], finite numbers of any floating dtype, to the nearest in `format`: uint8 [..., row_bytes].

    Scales are rounded to what they are stored as before codes are chosen. A group of zeros has a scale of 0,
    or the least.

        integers with a zero point      from the group's least number, or 0, to its largest, or 0
        integers of 8 bits without      the largest magnitude becomes 127
        fewer bits without              it becomes 2^(bits - 1) - 1, or -2^(bits - 1) at a scale of the other sign,
                                        whichever is closer to the group in squares (as in ggml, scales may be negative)
        others                          the largest magnitude becomes the largest value; e8m0 rounds the scale up
        scales of rows                  such that the largest scale of a group becomes 1; 448 for fp8_e4m3
    """
    inner, rows = weights.shape[-1], weights.reshape(-1, weights.shape[-1])
    out = torch.empty(len(rows), format.row_bytes(inner), dtype=torch.uint8, device=weights.device)
    step = max(1, (1 << 22) // max(1, inner))  # what it takes meanwhile is a few times as large
    for start in range(0, len(rows), step):
        out[start : start + step] = _quantize(rows[start : start + step].float(), format)
    return out.view(*weights.shape[:-1], -1)


class _Rounded(NamedTuple):
    """Groups [rows, groups, size] as they would be stored."""

    codes: torch.Tensor  # [rows, groups, size]
    stored: torch.Tensor  # scales [rows, groups]
    zeros: torch.Tensor  # [rows, groups]
    scales: torch.Tensor  # as they count


def _quantize(weights: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    inner = weights.shape[-1]
    size = format.for_rows(inner).group or inner
    grouped = functional.pad(weights, (0, -inner % size)).unflatten(-1, (-1, size))
    exact_scales = _candidate_scales(grouped, format)
    row_scales = None
    if format.row_scale:
        row_scales = exact_scales[0].abs().amax(-1) / (448.0 if format.scale == "fp8_e4m3" else 1.0)
    best, *alternatives = (_rounded(grouped, each, row_scales, format) for each in exact_scales)
    for alternative in alternatives:
        better = _error(alternative, grouped, format) < _error(best, grouped, format)
        codes = torch.where(better.unsqueeze(-1), alternative.codes, best.codes)
        stored = torch.where(better, alternative.stored.float(), best.stored.float()).to(best.stored.dtype)
        best = _Rounded(codes, stored, best.zeros, torch.where(better, alternative.scales, best.scales))
    zeros = best.zeros.to(torch.uint8) if format.zero else None
    return encode(best.codes.flatten(-2)[..., :inner], best.stored, zeros, format, row_scales)


def _candidate_scales(grouped: torch.Tensor, format: GroupFormat) -> list[torch.Tensor]:
    """The scales [rows, groups] to try, not yet rounded."""
    largest = grouped.amax(-1)
    if format.zero:
        return [(largest.clamp(min=0) - grouped.amin(-1).clamp(max=0)) / (2**format.bits - 1)]
    magnitude = grouped.abs().amax(-1)
    scales = [magnitude / _largest_value(format)]
    if format.code.startswith("uint") and format.bits < 8:
        sign = -1.0 if format.scale != "e8m0" else 1.0
        scales.append(torch.where(largest == magnitude, sign, 1.0) * magnitude / 2 ** (format.bits - 1))
    return scales


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
    """Squared, of each group."""
    code_values = values(format.code).to(grouped.device)[rounded.codes.int()] - rounded.zeros.unsqueeze(-1)
    return (rounded.scales.unsqueeze(-1) * code_values - grouped).square().sum(-1)


def _largest_value(format: GroupFormat) -> float:
    finite = values(format.code)
    return float(finite[finite.isfinite()].max()) - implied_zero(format.code)


def _stored_scales(scales: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """As they are stored; those that are too large become the largest."""
    dtype = SCALE_DTYPES[format.scale]
    if format.scale == "e8m0":
        fraction, exponent = torch.frexp(scales)
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, 127)
        return (exponent + 127).to(torch.uint8).view(dtype)
    return scales.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def _quotient(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """0 where the scale is 0."""
    return torch.where(scales == 0, 0.0, values / torch.where(scales == 0, 1.0, scales))


def _nearest(scaled: torch.Tensor, zeros: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """The codes, as bytes, whose values are nearest to `scaled`, their zero points apart."""
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
    """What uint8 [..., n] hold. A copy: a single row of a matrix is contiguous and keeps the matrix's stride."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _pack(units: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., 32] codes → [..., 4 × bits]."""
    if bits == 8:
        return units
    if bits == 4:
        return units[..., :16] | units[..., 16:] << 4
    # Different bits, so their sum has them all.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=units.device).unsqueeze(-1)
    low = (units & 3).unflatten(-1, (4, 8)) << shifts
    packed: torch.Tensor = low.sum(-2, dtype=torch.uint8)
    if bits == 3:
        high = (units >> 2).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=units.device)
        packed = torch.cat([packed, high.sum(-1, dtype=torch.uint8)], dim=-1)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The other way round."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.cat([packed & 15, packed >> 4], dim=-1)
    low = torch.cat([packed[..., :8] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    if bits == 2:
        return low
    high = packed[..., 8:].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return torch.bitwise_or(low, (high & 1).flatten(-2) << 2)
