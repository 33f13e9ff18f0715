"""Which matrices are quantized, and into what, when a checkpoint of numbers is loaded with ``--quantization``.

Matrices of attention, MLP and experts are; embedding, head, routers and norms are not, nor are latent attention's keys
and values, which are computed with transposed. Groups are as small as a unit of codes, so that tensor parallelism can
cut most rows between them.
"""

from __future__ import annotations

import re
from typing import Final

from stoker_engine.architectures.stored_formats import GroupFormat

#: By the name that ``--quantization`` takes.
ON_LOAD: Final = {
    "int8": GroupFormat("int8", 32, "float16"),
    "int4": GroupFormat("uint4", 32, "float16", zero=True),
    "fp8": GroupFormat("fp8_e4m3", 32, "bfloat16"),
}

#: The matrices of a layer that are quantized, by the names of their weights in it.
MATRICES: Final = frozenset(
    {"q", "k", "v", "o", "q_a", "q_b", "kv_a"}
    | {f"{mlp}{part}" for mlp in ("", "experts.", "shared.") for part in ("gate", "up", "down")}
)

_WEIGHT: Final = re.compile(r"layers\.\d{1,9}\.(.*)\.weight")


def is_quantized(param_name: str) -> bool:
    """Whether the weight of that name (``layers.3.experts.7.gate.weight``, see `models.decoder`) is one of them."""
    match = _WEIGHT.fullmatch(param_name)
    return match is not None and re.sub(r"\.\d+\.", ".", match[1]) in MATRICES
