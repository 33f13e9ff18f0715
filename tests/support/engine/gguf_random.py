"""Random matrices in GGUF's types, with all codes, and scales of both signs and many sizes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat

#: Positions of float16 values in a block: its scale, and the scale of its offsets.
SCALES: Final = {
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


def random_blocks(format: GGUFFormat, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Return random finite blocks as uint8 [rows, blocks × format.bytes], in memory of exactly that size."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, blocks, format.bytes
    drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for offset in SCALES.get(format.name, ()):
        scales = torch.randn(rows, blocks, 1, generator=generator) / 64
        scales *= 2.0 ** torch.randint(-8, 3, scales.shape, generator=generator)
        drawn[..., offset : offset + 2] = scales.to(torch.float16).view(torch.uint8)
    if format.name == "MXFP4":
        drawn[..., 0] = torch.randint(110, 130, drawn.shape[:-1], generator=generator)
    if format.name == "BF16":
        drawn = torch.randn(rows, blocks, 1, generator=generator).to(torch.bfloat16).view(torch.uint8)
    return drawn.view(rows, blocks * format.bytes)


def dequantized(blocks: torch.Tensor, format: GGUFFormat, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize by the gguf library, rounded by torch."""
    with np.errstate(all="ignore"):
        exact = dequantize(blocks.contiguous().numpy(), GGMLQuantizationType[format.name])
    return torch.from_numpy(np.asarray(exact, dtype=np.float32)).to(dtype)


def quantized(values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Quantize `values`; for types that the gguf library cannot write, return random values of about that size."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        format = GGUF_FORMATS[kind.name]
    rows = values.size // values.shape[-1]
    blocks = random_blocks(format, rows, values.shape[-1] // format.numbers, seed=values.size)
    factor = float(values.std() / dequantized(blocks, format, torch.float32).std())
    parts = blocks.view(rows, -1, format.bytes)
    for offset in SCALES[format.name]:
        scales = parts[..., offset : offset + 2].contiguous().view(torch.float16).float() * factor
        parts[..., offset : offset + 2] = scales.to(torch.float16).view(torch.uint8)
    return blocks.view(*values.shape[:-1], -1).numpy()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether tensors are bitwise equal, except for the bits of NaNs."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        torch.where(found.isnan(), 0, found).view(torch.uint8),
        torch.where(expected.isnan(), 0, expected).view(torch.uint8),
    )
