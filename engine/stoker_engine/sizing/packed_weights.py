"""Quantized matrices on GPUs: which formats are packed into tiles of words once they are loaded, and the memory that
multiplications need besides.

A packed matrix takes as many bytes as its rows of blocks. Multiplications of many rows dequantize the matrix slab by
slab.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.sizing.weight_formats import Formats, WeightFormats

#: Maximum bytes of a dequantized slab; the partial sums of multiplications of few rows take less. A slab fits into the
#: L2 cache of an H100 (50 MB). The value was not tuned by measurements.
SLAB_BYTES: Final = 32 << 20

#: GGUF's types that are packed. GPUs dequantize matrices of the other types while loading.
PACKED_TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")

#: Scales of packed groups, by the codes' type.
_SCALES: Final = {
    **dict.fromkeys(("uint4", "uint8", "int8"), ("float32", "float16", "bfloat16")),
    "fp4": ("e8m0", "fp8_e4m3"),
}


def is_packed(stored: StoredFormat) -> bool:
    """Whether GPUs pack matrices of this format: `PACKED_TYPES`, groups of integers of 4 and 8 bits whose scales are
    floats of at least 16 bits, MXFP4 and NVFP4. `kernels.triton.quant.packed_layout.fit` limits their sizes."""
    if isinstance(stored, GGUFFormat):
        return stored.name in PACKED_TYPES
    takes_row_scale = stored.code == "fp4" or not stored.row_scale
    return takes_row_scale and stored.scale in _SCALES.get(stored.code, ())


def formats_on_gpus(formats: WeightFormats) -> WeightFormats:
    """Return the formats in a GPU's memory of weights that a GGUF file has in `formats`. These are dequantized:

    - weights of types that are not packed;
    - a layer's experts, unless gates and up projections have the same type and all three matrices are packed: others
      are not grouped into one multiplication, so the host would have to wait for their numbers of tokens;
    - latent attention's stack of one small matrix for each head.
    """
    return WeightFormats(_kept(formats.ends), tuple(map(_kept, formats.layers)))


def _kept(formats: Formats) -> Formats:
    kept = {name: stored for name, stored in formats if is_packed(stored) and name != "v_b"}
    gate, up, down = (kept.get(f"experts.{part}") for part in ("gate", "up", "down"))
    if gate != up or gate is None or down is None:
        kept = {name: stored for name, stored in kept.items() if not name.startswith("experts.")}
    return frozenset(kept.items())


def slab_rows(outputs: int, inner: int, element_bytes: int, multiple: int) -> int:
    """Return the rows of the slabs of a matrix: multiples of `multiple`, and about equal.

    Args:
        outputs, inner: size of the matrix.
        element_bytes: bytes of a dequantized element.
    """
    max_tiles = max(1, SLAB_BYTES // (inner * element_bytes * multiple))
    tiles = -(-outputs // multiple)
    return -(-tiles // -(-tiles // max_tiles)) * multiple


def workspace_bytes(formats: WeightFormats) -> int:
    """Return the bytes that multiplications with a model's matrices need in addition to their operands and results.
    Experts need them only with adapters, which compute one expert after the other."""
    found = any(is_packed(stored) for part in (formats.ends, *formats.layers) for _, stored in part)
    return SLAB_BYTES if found else 0
