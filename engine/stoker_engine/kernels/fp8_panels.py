"""Matrices of e4m3 with a scale for each row, packed for FP8 tensor cores: codes and scales apart, both aligned.

rows      │ s c c … c 0 │ s c c … c 0 │ …    as `group_blocks` stores them: 4 bytes of scale, codes, padding of the row
packed    │ c c … c │ c c … c │ … │ s s …    in the same memory; torch's kernel for compute capability 8.9 reads codes
                                             as if rows were adjacent, whatever their stride
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.kernels.bundle import Activations, BlockPanels, QuantizedRows
from stoker_engine.kernels.fp8_linear import MULTIPLE, fp8_linear

_SCALE_BYTES: Final = 4


class Packed(NamedTuple):
    """Views of a packed matrix.

    Attributes:
        codes: float8_e4m3fn [outputs, inner], contiguous.
        scales: float32 [1, outputs].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, blocks: torch.Tensor, inner: int) -> Packed:
        """Return the views of `blocks`, uint8 [outputs, bytes of a row]."""
        outputs, memory = len(blocks), blocks.view(-1)
        codes, scales = memory[: outputs * inner], memory[outputs * inner :][: outputs * _SCALE_BYTES]
        rows = codes.view(torch.float8_e4m3fn).view(outputs, inner)
        return cls(rows, scales.view(torch.float32).view(1, outputs))


class Fp8Linear:
    """Linear operation with a packed matrix. It also accepts rows that are already quantized."""

    def __init__(
        self,
        packed: Packed,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        quantize: Callable[[torch.Tensor], QuantizedRows],
    ) -> None:
        self._packed, self._dtype, self._bias, self._quantize = packed, dtype, bias, quantize

    def __call__(self, x: Activations) -> torch.Tensor:
        """[..., inner] → [..., outputs]; quantized rows → [rows, outputs]."""
        if isinstance(x, QuantizedRows):
            return fp8_linear(x, *self._packed, self._dtype, self._bias)
        out = fp8_linear(self._quantize(x), *self._packed, self._dtype, self._bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def fp8_panels(quantize: Callable[[torch.Tensor], QuantizedRows]) -> BlockPanels:
    """Return the operations, which quantize activations by `quantize` (see `Fp8Kernels`)."""

    def linear(
        blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> Fp8Linear:
        return Fp8Linear(Packed.of(blocks, inner), dtype, bias, quantize)

    return BlockPanels(fit=fit, pack=pack, linear=linear, rows=rows)


def fp8_panels_or(others: BlockPanels, quantize: Callable[[torch.Tensor], QuantizedRows]) -> BlockPanels:
    """Return operations that are those of `fp8_panels` for formats with `fp8_activations`, else those of `others`."""
    of_fp8 = fp8_panels(quantize)

    def of(stored: StoredFormat) -> BlockPanels:
        return of_fp8 if isinstance(stored, GroupFormat) and stored.fp8_activations else others

    return BlockPanels(
        fit=lambda blocks, stored, inner, dtype: of(stored).fit(blocks, stored, inner, dtype),
        pack=lambda blocks, stored, inner: of(stored).pack(blocks, stored, inner),
        linear=lambda blocks, stored, inner, dtype, bias=None: of(stored).linear(blocks, stored, inner, dtype, bias),
        rows=lambda blocks, stored, inner, ids, dtype: of(stored).rows(blocks, stored, inner, ids, dtype),
    )


def fit(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
    """See `BlockPanels`."""
    return (
        isinstance(stored, GroupFormat)
        and stored.fp8_activations
        and stored.groups(inner) == 1
        and stored.scale == "float32"
        and dtype == torch.bfloat16
        and blocks.is_contiguous()
        and not (len(blocks) % MULTIPLE or inner % MULTIPLE)
    )


def pack(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """See `BlockPanels`."""
    scales, codes = blocks[:, :_SCALE_BYTES].flatten(), blocks[:, _SCALE_BYTES : _SCALE_BYTES + inner].flatten()
    packed = torch.cat([codes, scales])
    blocks.view(-1)[: len(packed)] = packed


def rows(blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `BlockPanels`."""
    codes, scales = Packed.of(blocks, inner)
    # torch indexes no float8: bytes are looked up.
    found = codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
    return (scales[0, ids].unsqueeze(-1) * found.float()).to(dtype)
