"""Which matrices are quantized, and into what, when a checkpoint of numbers is loaded with ``--quantization``.

Matrices of attention, MLP and experts are; embedding, head, routers and norms are not, nor are latent attention's keys
and values, which are computed with transposed. Groups are as small as a unit of codes, so that whatever tensor
parallelism cuts out of a row is whole groups.
"""

from __future__ import annotations

import re
from typing import Final

from stoker_engine.architectures.stored_formats import GroupFormat

#: By the name that ``--quantization`` takes.
ON_LOAD: Final = {
    "int8": GroupFormat("int8", 32, "float16"),
    "int4": GroupFormat("uint4", 32, "float16"),
    "fp8": GroupFormat("fp8_e4m3", 32, "float16"),
}

_MATRIX: Final = re.compile(
    r"layers\.\d{1,9}\.(q|k|v|o|q_a|q_b|kv_a|gate|up|down|experts\.\d{1,9}\.(gate|up|down)|shared\.(gate|up|down))\.weight"
)


def is_quantizable(slot: str) -> bool:
    """Whether the weight of that name (see `models.decoder`) is one of the matrices that are quantized."""
    return _MATRIX.fullmatch(slot) is not None
