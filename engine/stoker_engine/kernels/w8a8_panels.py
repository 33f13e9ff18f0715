"""Matrices of 8-bit codes for products with quantized activations, packed: codes and scales apart, both aligned.

rows      │ s s … c c … c 0 │ s s … c c … c 0 │ …    as `group_blocks` stores them: scales of the groups, codes, padding
packed    │ c c … c │ c c … c │ … │ s s … │ s s … │  in the same memory: rows of codes, then for each group the scales
                                                     of all rows. torch's kernel for compute capability 8.9 reads codes
                                                     as if rows were adjacent, whatever their stride
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

import torch

from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.kernels.bundle import Activations, BlockPanels, QuantizedRows, QuantizingKernels, RowFormat
from stoker_engine.kernels.group_blocks import SCALE_DTYPES
from stoker_engine.kernels.w8a8_linear import MULTIPLE, MultiplyW8A8

#: Dtypes of activations with which matrices are multiplied. torch's `_scaled_mm` with scales for rows computes only
#: bfloat16 on all GPUs.
_DTYPES: Final[Mapping[RowFormat, Collection[torch.dtype]]] = {
    RowFormat.FP8_ROWS: (torch.bfloat16,),
    RowFormat.FP8_GROUPS: (torch.bfloat16,),
    RowFormat.INT8_ROWS: (torch.bfloat16, torch.float16),
}


def row_format(stored: StoredFormat, inner: int) -> RowFormat | None:
    """Return the format of the activations with which a matrix with rows of `inner` elements is multiplied; None if
    activations are not quantized."""
    if not isinstance(stored, GroupFormat) or not stored.quantized_activations or stored.zero or stored.row_scale:
        return None
    has_rows = stored.groups(inner) == 1
    if stored.code == "int8":
        return RowFormat.INT8_ROWS if has_rows else None
    if has_rows and stored.scale == "float32":
        return RowFormat.FP8_ROWS
    has_floats = stored.scale in ("float32", "float16", "bfloat16")
    return RowFormat.FP8_GROUPS if stored.group == RowFormat.FP8_GROUPS.group and has_floats else None


class Packed(NamedTuple):
    """Views of a packed matrix, or of a stack of matrices that are packed one by one.

    Attributes:
        codes: float8_e4m3fn or int8 [..., outputs, inner], contiguous in each matrix.
        scales: [..., groups, outputs] in the stored dtype.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, blocks: torch.Tensor, stored: StoredFormat, inner: int) -> Packed:
        """Return the views of `blocks`, uint8 [..., outputs, bytes of a row]."""
        format = row_format(stored, inner)
        assert format is not None and isinstance(stored, GroupFormat)
        outputs, dtype = blocks.shape[-2], SCALE_DTYPES[stored.scale]
        memory, num_codes = blocks.flatten(-2), blocks.shape[-2] * inner
        codes = memory[..., :num_codes].view(format.dtype).unflatten(-1, (outputs, inner))
        num_scales = outputs * format.groups(inner)
        scales = memory[..., num_codes : num_codes + num_scales * dtype.itemsize].view(dtype)
        return cls(codes, scales.unflatten(-1, (-1, outputs)))


class W8A8Linear:
    """Linear operation with a packed matrix. It also accepts rows that are already quantized.

    Attributes:
        row_format: format of such rows.
    """

    def __init__(
        self,
        row_format: RowFormat,
        packed: Packed,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        quantize: Callable[[torch.Tensor], QuantizedRows],
        multiply: MultiplyW8A8,
    ) -> None:
        self.row_format = row_format
        self._packed, self._dtype, self._bias = packed, dtype, bias
        self._quantize, self._multiply = quantize, multiply

    def __call__(self, x: Activations) -> torch.Tensor:
        """[..., inner] → [..., outputs]; quantized rows → [rows, outputs]."""
        if isinstance(x, QuantizedRows):
            return self._multiply(x, *self._packed, self._dtype, self._bias)
        out = self._multiply(self._quantize(x), *self._packed, self._dtype, self._bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def w8a8_panels(
    quantizing: dict[RowFormat, QuantizingKernels],
    multiply: dict[RowFormat, MultiplyW8A8],
    others: BlockPanels | None = None,
) -> BlockPanels:
    """Return operations on matrices that are multiplied with quantized activations.

    Args:
        quantizing, multiply: quantization of activations and multiplication, for each format of activations.
        others: operations on matrices of other formats; None if these are not packed.
    """

    def fit(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
        if row_format(stored, inner) in multiply:
            return _fit(blocks, stored, inner, dtype)
        return others is not None and others.fit(blocks, stored, inner, dtype)

    def fit_stack(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
        if row_format(stored, inner) in multiply:
            return _fit(blocks, stored, inner, dtype)
        return others is not None and others.fit_stack is not None and others.fit_stack(blocks, stored, inner, dtype)

    def pack_or(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
        if row_format(stored, inner) in multiply:
            pack(blocks, stored, inner)
        elif others is not None:
            others.pack(blocks, stored, inner)

    def linear(
        blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        format = row_format(stored, inner)
        if format not in multiply:
            assert others is not None, "the matrix does not fit"
            return others.linear(blocks, stored, inner, dtype, bias)
        packed = Packed.of(blocks, stored, inner)
        return W8A8Linear(format, packed, dtype, bias, quantizing[format].quantize, multiply[format])

    def rows_or(
        blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if row_format(stored, inner) in multiply:
            return rows(blocks, stored, inner, ids, dtype)
        assert others is not None, "the matrix does not fit"
        return others.rows(blocks, stored, inner, ids, dtype)

    return BlockPanels(fit=fit, pack=pack_or, linear=linear, rows=rows_or, fit_stack=fit_stack)


def _fit(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
    """Whether a matrix, or each matrix of a stack, can be packed."""
    format = row_format(stored, inner)
    has_tiles = not (blocks.shape[-2] % MULTIPLE or inner % MULTIPLE)
    return format is not None and dtype in _DTYPES[format] and blocks.is_contiguous() and has_tiles


def pack(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """See `BlockPanels`. The matrices of a stack are packed one by one."""
    if blocks.dim() == 3:
        for matrix in blocks:
            pack(matrix, stored, inner)
        return
    format = row_format(stored, inner)
    assert format is not None and isinstance(stored, GroupFormat)
    size = format.groups(inner) * SCALE_DTYPES[stored.scale].itemsize
    scales = blocks[:, :size].unflatten(-1, (format.groups(inner), -1)).transpose(0, 1).flatten()
    packed = torch.cat([blocks[:, size : size + inner].flatten(), scales])
    blocks.view(-1)[: len(packed)] = packed


def rows(blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `BlockPanels`."""
    codes, scales = Packed.of(blocks, stored, inner)
    # Rows are gathered as bytes, because torch cannot index float8 tensors on every device.
    found = codes.view(torch.uint8)[ids].view(codes.dtype).float()
    of_rows = scales[:, ids].t().float()
    format = row_format(stored, inner)
    if format is not None and format.group:
        of_rows = of_rows.repeat_interleave(format.group, dim=1)[:, :inner]
    return (of_rows * found).to(dtype)
