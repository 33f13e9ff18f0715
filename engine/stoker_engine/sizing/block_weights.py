"""Matrices that stay as a GGUF file holds them: in blocks of numbers that share a scale.

A file may hold some matrices so and others not. A matrix of the model that merges several of the file (queries, keys
and values; gates and up projections; a layer's experts) stays in blocks if all of them are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class BlockFormat:
    """A way to store numbers that follow each other in a row.

    Attributes:
        name: ggml's name of it.
        numbers: so many make a block.
        bytes: that it takes.
    """

    name: str
    numbers: int
    bytes: int

    def stored_bytes(self, numbers: int) -> int:
        """What `numbers` numbers in whole blocks take."""
        return numbers // self.numbers * self.bytes


#: A float16 scale and 32 integers of 8 bits.
Q8_0: Final = BlockFormat("Q8_0", 32, 34)


@dataclass(frozen=True)
class BlockWeights:
    """Which weights of a model are Q8_0's blocks.

    Attributes:
        ends: those outside of layers: ``embed``, ``lm_head``.
        layers: those of each layer: ``q``, ``down``, ``experts.gate``, ``shared.up``; none where there is no entry.
    """

    ends: frozenset[str] = frozenset()
    layers: tuple[frozenset[str], ...] = ()

    @classmethod
    def of(cls, in_blocks: Iterable[str], otherwise: Iterable[str]) -> BlockWeights:
        """Of a file's weights, by the names of their slots (`models.decoder`), those that are Q8_0 and all others.

        Experts are one matrix: with one of them that is stored otherwise, all are.
        """
        found: dict[int | None, set[str]] = {}
        for name in in_blocks:
            layer, part = _part(name)
            found.setdefault(layer, set()).add(part)
        for name in otherwise:
            layer, part = _part(name)
            found.get(layer, set()).discard(part)
        last = max((layer for layer in found if layer is not None), default=-1)
        layers = tuple(frozenset(found.get(layer, ())) for layer in range(last + 1))
        return cls(frozenset(found.get(None, ())), layers)

    def hold(self, slots: Sequence[str]) -> bool:
        """Whether the matrix that holds these slots is in blocks."""
        parts = dict.fromkeys(map(_part, slots))
        return all(part in (self.ends if layer is None else self.layer(layer)) for layer, part in parts)

    def layer(self, index: int) -> frozenset[str]:
        """Those of one layer."""
        return self.layers[index] if index < len(self.layers) else frozenset()


_LAYER: Final = re.compile(r"layers\.(\d{1,9})\.(.*)")


def _part(slot: str) -> tuple[int | None, str]:
    """``layers.3.experts.7.gate.weight`` → 3, ``experts.gate``. A bias is a part by its own name."""
    name = slot.removesuffix(".weight")
    match = _LAYER.match(name)
    layer, part = (None, name) if match is None else (int(match[1]), match[2])
    return layer, re.sub(r"\.\d+\.", ".", part)


#: All weights are of the model's dtype.
NO_BLOCKS: Final = BlockWeights()

#: Models of these are computed with blocks, on CPUs that have our kernels; others dequantize them.
BLOCK_DTYPES: Final = ("float32", "bfloat16")
