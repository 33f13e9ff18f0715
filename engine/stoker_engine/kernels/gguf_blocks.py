"""Layout and dequantization of GGUF's types.

    a row     │ block │ block │ …        a block has 32, 256 or 1 elements

Blocks of 32 elements. An element is a scale d times an integer q, in some types plus an offset m. d and m are float16,
little-endian. In a byte with two codes the low half belongs to one of the first 16 elements, the high half to one of
the last 16:

    Q4_0     d 16 bytes             w = d (q - 8)
    Q4_1     d m 16 bytes           w = d q + m
    Q5_0     d high 16 bytes        w = d (q - 16)      high: 32 bits, the fifth bit of each q
    Q5_1     d m high 16 bytes      w = d q + m
    Q8_0     d 32 bytes             w = d q             q an int8
    IQ4_NL   d 16 bytes             w = d table[q]
    MXFP4    e 16 bytes             w = 2^(e - 127) × fp4[q]

Blocks of 256 elements, in eight units of 32. The scales s and offsets m of 16 or 32 elements are small integers:

    Q2_K     s,m (4 + 4 bits, ×16) 64 bytes d dmin          w = d s q - dmin m          q 2 bits
    Q3_K     high (32 bytes) 64 bytes s (6 bits, ×16) d     w = d (s - 32) (q - 4)      q 2 bits, and one in `high`
    Q4_K     d dmin s,m (6 + 6 bits, ×8) 128 bytes          w = d s q - dmin m          q 4 bits
    Q5_K     d dmin s,m high (32 bytes) 128 bytes           w = d s q - dmin m          q 4 bits, and one in `high`
    Q6_K     128 bytes high (64 bytes) s (int8, ×16) d      w = d s (q - 32)            q 4 bits, and two in `high`
    IQ4_XS   d high (2 bytes) s (4 bits, ×8) 128 bytes      w = d (s - 32) table[q]     s has two more bits in `high`

F16 and BF16 are unquantized elements. Source of the types: llama.cpp (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat

#: Values of the codes of IQ4_NL and IQ4_XS, denser around 0, as weights are.
_UNEVEN: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Twice the values of OCP's FP4 (e2m1); the high bit is the sign.
_FP4_TWICE: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(blocks: torch.Tensor, format: GGUFFormat, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize uint8 [..., inner / format.numbers × format.bytes] → [..., inner] in `dtype`.

    Evaluates the formulas above in float32 from left to right, then rounds. Products are exact in float32; sums with an
    offset are rounded.
    """
    parts = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // format.bytes, format.bytes)
    return _NUMBERS[format.name](parts).flatten(-2).to(dtype)


#: Byte offsets of the float16 values of a block: its scale (F16: its element), and its offset or the offsets' scale.
_SCALES: Final[dict[str, tuple[int, ...]]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "F16": (0,),
}


def all_finite(blocks: torch.Tensor, format: GGUFFormat) -> bool:
    """Whether all elements of `blocks` (uint8 [..., bytes of a row]) are finite. Only the values at `_SCALES` are
    checked; for BF16 all elements, and for MXFP4 those with the largest scales."""
    parts = blocks.reshape(-1, format.bytes)
    if format.name == "BF16":
        return bool(parts.contiguous().view(torch.bfloat16).isfinite().all())
    if format.name == "MXFP4":  # all scales are finite, but the largest overflow with some codes
        return bool(_mxfp4(parts[parts[:, 0] > 250]).isfinite().all())
    return all(bool(_float16(parts[:, at : at + 2]).isfinite().all()) for at in _SCALES[format.name])


def _halves(bytes: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., n] into their low and high halves → [..., 2, n]."""
    return torch.stack([bytes & 15, bytes >> 4], dim=-2)


def _bits(bytes: torch.Tensor, count: int) -> torch.Tensor:
    """Split bytes [..., n] into fields of `count` bits, from the lowest → [..., 8 / count, n]."""
    return torch.stack([bytes >> shift & ((1 << count) - 1) for shift in range(0, 8, count)], dim=-2)


def _float16(bytes: torch.Tensor) -> torch.Tensor:
    """Read float16 values from bytes [..., 2 n] → float32 [..., n]."""
    return bytes.contiguous().view(torch.float16).float()


def _table(codes: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]


def _q4_0(parts: torch.Tensor) -> torch.Tensor:
    return _float16(parts[..., :2]) * (_halves(parts[..., 2:]).flatten(-2).float() - 8)


def _q4_1(parts: torch.Tensor) -> torch.Tensor:
    codes = _halves(parts[..., 4:]).flatten(-2)
    return _float16(parts[..., :2]) * codes + _float16(parts[..., 2:4])


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Combine the fifth bits [..., 4] and the low four bits [..., 16] of codes → [..., 32]."""
    return _halves(low).flatten(-2) | _bits(high, 1).transpose(-1, -2).flatten(-2) << 4


def _q5_0(parts: torch.Tensor) -> torch.Tensor:
    return _float16(parts[..., :2]) * (_five_bits(parts[..., 2:6], parts[..., 6:]).float() - 16)


def _q5_1(parts: torch.Tensor) -> torch.Tensor:
    return _float16(parts[..., :2]) * _five_bits(parts[..., 4:8], parts[..., 8:]) + _float16(parts[..., 2:4])


def _q8_0(parts: torch.Tensor) -> torch.Tensor:
    return _float16(parts[..., :2]) * parts[..., 2:].contiguous().view(torch.int8)


def _q2_k(parts: torch.Tensor) -> torch.Tensor:
    scales, offsets = _halves(parts[..., :16])[..., None].unbind(-3)
    codes = _bits(parts[..., 16:80].unflatten(-1, (2, 32)), 2).reshape(*parts.shape[:-1], 16, 16)
    d, dmin = _float16(parts[..., 80:84])[..., None, None].unbind(-3)
    return (d * scales * codes - dmin * offsets).flatten(-2)


def _q3_k(parts: torch.Tensor) -> torch.Tensor:
    high = _bits(parts[..., :32], 1)
    codes = _bits(parts[..., 32:96].unflatten(-1, (2, 32)), 2).reshape(high.shape) | high << 2
    scales = _halves(parts[..., 96:104]).flatten(-2) | _bits(parts[..., 104:108], 2).flatten(-2) << 4
    d = _float16(parts[..., 108:])[..., None]
    signed = codes.unflatten(-1, (2, 16)).flatten(-3, -2).float() - 4
    elements: torch.Tensor = d * (scales.float()[..., None] - 32) * signed
    return elements.flatten(-2)


def _six_bits(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack d, dmin and eight scales and offsets of 6 bits: [..., 16] → d s and dmin m [..., 8, 1].

    After d and dmin, the low 6 bits of 8 bytes hold the first four scales and offsets. Of the other four, 4 bits are in
    the last 4 bytes, and 2 in the high bits of the first 8.
    """
    d, dmin = _float16(parts[..., :4])[..., None].unbind(-2)
    scales, offsets, low = parts[..., 4:].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([scales & 63, low & 15 | scales >> 6 << 4], dim=-1)
    offsets = torch.cat([offsets & 63, low >> 4 | offsets >> 6 << 4], dim=-1)
    return (d * scales)[..., None], (dmin * offsets)[..., None]


def _four_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Unpack 4-bit codes [..., 128] → [..., 8, 32]; two units share 32 bytes."""
    return _halves(bytes.unflatten(-1, (4, 32))).flatten(-3, -2)


def _q4_k(parts: torch.Tensor) -> torch.Tensor:
    scales, offsets = _six_bits(parts[..., :16])
    return (scales * _four_bits(parts[..., 16:]) - offsets).flatten(-2)


def _five_bit_codes(parts: torch.Tensor) -> torch.Tensor:
    """Unpack the codes of Q5_K → [..., 8, 32]."""
    return _four_bits(parts[..., 48:]) | _bits(parts[..., 16:48], 1) << 4


def _q5_k(parts: torch.Tensor) -> torch.Tensor:
    scales, offsets = _six_bits(parts[..., :16])
    return (scales * _five_bit_codes(parts) - offsets).flatten(-2)


def _six_bit_codes(parts: torch.Tensor) -> torch.Tensor:
    """Unpack the codes of Q6_K → [..., 8, 32]."""
    low = _halves(parts[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-4, -2)
    high = _bits(parts[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    return torch.bitwise_or(low, high << 4)


def _q6_k(parts: torch.Tensor) -> torch.Tensor:
    codes = _six_bit_codes(parts).float().unflatten(-1, (2, 16)).flatten(-3, -2) - 32
    scales = parts[..., 192:208].contiguous().view(torch.int8)[..., None]
    elements: torch.Tensor = _float16(parts[..., 208:])[..., None] * scales * codes
    return elements.flatten(-2)


def _iq4_nl(parts: torch.Tensor) -> torch.Tensor:
    return _float16(parts[..., :2]) * _table(_halves(parts[..., 2:]).flatten(-2), _UNEVEN)


def _iq4_xs(parts: torch.Tensor) -> torch.Tensor:
    low = _halves(parts[..., 4:8]).transpose(-1, -2).flatten(-2)
    high = _bits(parts[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).float()[..., None] - 32
    codes = _halves(parts[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return (_float16(parts[..., :2])[..., None] * scales * _table(codes, _UNEVEN)).flatten(-2)


def _mxfp4(parts: torch.Tensor) -> torch.Tensor:
    exponents = parts[..., :1].int()
    # Half of the scale, since the table has twice the values; the smallest two are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return bits.view(torch.float32) * _table(_halves(parts[..., 1:]).flatten(-2), _FP4_TWICE)


_NUMBERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "F16": _float16,
    "BF16": lambda parts: parts.contiguous().view(torch.bfloat16).float(),
}


#: Codes of the types that GPUs pack, as unsigned integers; those of Q8_0 have their high bit flipped.
_CODES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": lambda parts: _halves(parts[..., 2:]),
    "Q4_1": lambda parts: _halves(parts[..., 4:]),
    "Q5_0": lambda parts: _five_bits(parts[..., 2:6], parts[..., 6:]).unsqueeze(-2),
    "Q5_1": lambda parts: _five_bits(parts[..., 4:8], parts[..., 8:]).unsqueeze(-2),
    "Q8_0": lambda parts: parts[..., 2:].unsqueeze(-2) ^ 0x80,
    "Q4_K": lambda parts: _four_bits(parts[..., 16:]),
    "Q5_K": _five_bit_codes,
    "Q6_K": _six_bit_codes,
    "MXFP4": lambda parts: _halves(parts[..., 1:]),
}


def unsigned_codes(blocks: torch.Tensor, format: GGUFFormat) -> torch.Tensor:
    """Return the codes of uint8 [..., bytes of a row] as uint8 [..., inner], for the types that GPUs pack: unsigned
    integers, from which a zero point is subtracted (for Q8_0 128), or to whose product with the scale an offset is
    added; for MXFP4 the codes of FP4."""
    parts = blocks.unflatten(-1, (-1, format.bytes))
    return _CODES[format.name](parts).flatten(-3)
