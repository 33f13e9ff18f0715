"""Quantized matrices on GPUs: which formats are packed into tiles of words once they are loaded, and the memory that
multiplications need besides.

A packed matrix takes as many bytes as its rows of blocks. Products of many rows dequantize the matrix slab by slab.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.sizing.weight_formats import WeightFormats

#: Largest bytes of a dequantized slab, and more than the partial sums of products of few rows. A slab stays in the L2
#: cache of an H100 (50 MB). A guess that was not measured.
SLAB_BYTES: Final = 32 << 20

#: GGUF's types that consist of the same parts as a group format.
_LIKE_GROUPS: Final[dict[StoredFormat, GroupFormat]] = {
    GGUF_FORMATS["Q4_0"]: GroupFormat("uint4", 32, "float16"),
    GGUF_FORMATS["Q8_0"]: GroupFormat("int8", 32, "float16"),
}


def group_format(stored: StoredFormat) -> GroupFormat | None:
    """Return the group format with the scales and codes of `stored` if matrices of it are packed, else None: integers
    of 4 or 8 bits whose scales are floats of at least 16 bits."""
    stored = _LIKE_GROUPS.get(stored, stored)
    if not isinstance(stored, GroupFormat) or stored.row_scale:
        return None
    has_parts = stored.code in ("uint4", "uint8", "int8") and stored.scale in ("float32", "float16", "bfloat16")
    return stored if has_parts else None


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
    """Return the bytes that multiplications with the matrices of a model's layers need in addition to their operands
    and results. Experts are not packed."""
    stored = {each for layer in formats.layers for name, each in layer if not name.startswith("experts.")}
    return SLAB_BYTES if any(group_format(each) is not None for each in stored) else 0
