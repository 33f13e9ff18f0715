"""Packing of matrices after they are loaded, in place (`packed_layout`)."""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.gguf_blocks import unsigned_codes
from stoker_engine.kernels.group_blocks import SCALE_DTYPES, unpack
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedTile, tile_of

#: Number of elements that are packed at a time, which bounds temporary memory.
_ELEMENTS: Final = 1 << 24

#: GGUF's type → scales and other values that are stored apart from the codes: their bytes in a block, and the number of
#: bytes of a value.
_APART: Final[dict[str, tuple[tuple[slice, int], ...]]] = {
    "Q4_0": ((slice(2), 2),),
    "Q4_1": ((slice(4), 4),),
    "Q5_0": ((slice(2), 2),),
    "Q5_1": ((slice(4), 4),),
    "Q8_0": ((slice(2), 2),),
    "Q4_K": ((slice(16), 4),),
    "Q5_K": ((slice(16), 4),),
    "Q6_K": ((slice(192, 208), 4), (slice(208, 210), 2)),
    "MXFP4": ((slice(1), 1),),
}


def pack(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """See `BlockPanels.pack`. Needs temporary memory for the codes of some rows, and for all that is not in the words.

    Args:
        blocks: uint8 [outputs, bytes of a row], or [count, outputs, bytes of a row]; see `packed_layout.fit`.
    """
    stack = blocks if blocks.dim() == 3 else blocks.unsqueeze(0)
    at_once = max(1, _ELEMENTS // (stack.shape[1] * inner))
    for start in range(0, len(stack), at_once):
        _pack(stack[start : start + at_once], stored, inner)


def _pack(stack: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """Pack some matrices: all their rows at once, unless there is only one matrix."""
    tile, (count, outputs, _) = tile_of(stored, inner), stack.shape
    memory = stack.view(count, -1)
    word_bytes = outputs * inner * tile.bits // 8
    words = memory[:, :word_bytes].view(torch.int32).view(count, outputs // ROWS, -1, ROWS * tile.words)
    step = outputs if count > 1 else max(1, _ELEMENTS // (inner * ROWS)) * ROWS
    high, apart = list[torch.Tensor](), list[list[torch.Tensor]]()
    for start in range(0, outputs, step):
        rows = stack[:, start : start + step]
        codes = _in_order(_codes(rows, stored, inner), tile)
        apart.append([each.transpose(1, 2).contiguous() for each in _apart(rows, stored, inner)])
        if tile.high:
            high.append(_high_bits(codes, tile).view(count, -1))
        # The words of these rows end before the blocks of the next ones, which are still to be read.
        of_rows = words[:, start // ROWS : (start + rows.shape[1]) // ROWS]
        of_rows.copy_(_words(codes, tile).view(of_rows.shape))
    rest = [torch.cat(high, dim=1)] if high else []
    rest += [torch.cat(parts, dim=2) for parts in zip(*apart, strict=True)]
    end = word_bytes
    for each in rest:
        start, end = end, end + each[0].numel()
        memory[:, start:end] = each.flatten(1)
    assert end == memory.shape[1]


def _codes(rows: torch.Tensor, stored: StoredFormat, inner: int) -> torch.Tensor:
    """Return the unsigned codes of uint8 [count, rows, bytes of a row], uint8 [count, rows, inner]."""
    if isinstance(stored, GGUFFormat):
        return unsigned_codes(rows, stored)
    codes = unpack(rows[..., -(inner * stored.bits // 8) :], stored)
    return codes ^ 0x80 if stored.code == "int8" else codes


def _apart(rows: torch.Tensor, stored: StoredFormat, inner: int) -> list[torch.Tensor]:
    """Return what follows the words and the high bits, in this order, each uint8 [count, rows, values, bytes]."""
    if isinstance(stored, GGUFFormat):
        blocks = rows.unflatten(-1, (-1, stored.bytes))
        return [blocks[..., at].unflatten(-1, (-1, size)).flatten(2, 3) for at, size in _APART[stored.name]]
    groups, scale_bytes = stored.groups(inner), SCALE_DTYPES[stored.scale].itemsize
    first = 4 * stored.row_scale
    zeros = first + groups * scale_bytes
    found = [rows[..., first:zeros].unflatten(-1, (-1, scale_bytes))]
    if stored.zero:
        found.append(rows[..., zeros : zeros + groups].unsqueeze(-1))
    if stored.row_scale:
        found.append(rows[..., :4].unsqueeze(-2))
    return found


def _in_order(codes: torch.Tensor, tile: PackedTile) -> torch.Tensor:
    """Return codes uint8 [count, rows, inner] in the order of the words:
    [count × tiles, tiles of a row, w3, r5 r4, r2 r1 r0, w2 w1, r3, w0, planes]."""
    # [count × tiles, r5 r4, r3, r2 r1 r0, tiles of a row, planes, w3, w2 w1, w0]
    apart = codes.reshape(-1, 4, 2, 8, codes.shape[-1] // tile.columns, 32 // tile.bits, tile.words // 8, 4, 2)
    return apart.permute(0, 4, 6, 1, 3, 7, 2, 8, 5)


def _words(codes: torch.Tensor, tile: PackedTile) -> torch.Tensor:
    """Return the words of the result of `_in_order`, int32 in one dimension."""
    if tile.bits == 4:
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int32).flatten()


def _high_bits(codes: torch.Tensor, tile: PackedTile) -> torch.Tensor:
    """Return the high bits of the result of `_in_order`, uint8 in one dimension."""
    planes = 8 // tile.high  # of a byte
    shifts = torch.arange(0, 8, tile.high, dtype=torch.uint8, device=codes.device)
    # The shifted bits have none in common, so the sum is their union.
    joined: torch.Tensor = ((codes >> 4).unflatten(-1, (-1, planes)) << shifts).sum(-1, dtype=torch.uint8)
    return joined.flatten()
