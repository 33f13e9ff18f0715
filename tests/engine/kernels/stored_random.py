"""Random matrices in blocks that kernels pack into panels."""

from __future__ import annotations

import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat, GroupFormat, StoredFormat

from ...support.engine.gguf_random import random_blocks
from .group_random import name_of, random_groups

GGUF_IN_PANELS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
#: All kinds of codes, with and without zero points; all kinds of scales; groups of a unit, of several, of a row.
GROUPS_IN_PANELS = [
    GroupFormat("uint4", 128, "float16", zero=True), GroupFormat("uint4", 32, "bfloat16"),
    GroupFormat("uint4", 0, "float32", zero=True), GroupFormat("uint4", 96, "float32", zero=True),
    GroupFormat("uint8", 96, "float16", zero=True), GroupFormat("uint8", 64, "float32"),
    GroupFormat("uint8", 256, "bfloat16", zero=True), GroupFormat("int8", 0, "float32"),
    GroupFormat("int8", 32, "float16"), GroupFormat("int8", 64, "float16"), GroupFormat("int8", 320, "float16"),
]  # fmt: skip
IN_PANELS: list[StoredFormat] = [*(GGUF_FORMATS[name] for name in GGUF_IN_PANELS), *GROUPS_IN_PANELS]


def id_of(stored: StoredFormat) -> str:
    """Return the id of a test's parameter."""
    return stored.name if isinstance(stored, GGUFFormat) else name_of(stored)


def whole_numbers(stored: StoredFormat, at_least: int) -> int:
    """Round a row length up to whole blocks, as panels require."""
    unit = stored.numbers if isinstance(stored, GGUFFormat) else 32
    return -(-at_least // unit) * unit


def random_stored(stored: StoredFormat, outputs: int, inner: int, seed: int) -> torch.Tensor:
    """Return uint8 [outputs, bytes of a row]; all values are finite."""
    if isinstance(stored, GGUFFormat):
        return random_blocks(stored, outputs, inner // stored.numbers, seed)
    return random_groups(stored, outputs, inner, seed).blocks
