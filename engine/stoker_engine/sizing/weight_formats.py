"""Which weights of a model are stored in blocks, and in which format.

A file may hold some matrices so and others not, or in several formats. Matrices of the model that are multiplied
together (queries, keys and values; gates and up projections) need not be stored alike; the experts of a layer do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.quantization.on_load import MATRICES
from stoker_engine.architectures.stored_formats import StoredFormat

#: Weights by their names within a layer (``q``, ``down``, ``experts.gate``, ``shared.up``), or outside (``embed``).
Formats = frozenset[tuple[str, StoredFormat]]


@dataclass(frozen=True)
class WeightFormats:
    """The formats of a model's weights; those that are not named are numbers of the model's dtype.

    Attributes:
        ends: of weights outside of layers: ``embed``, ``lm_head``.
        layers: of those of each layer; none where there is no entry.
    """

    ends: Formats = frozenset()
    layers: tuple[Formats, ...] = ()

    @classmethod
    def of(cls, by_name: Mapping[str, StoredFormat | None]) -> WeightFormats:
        """Of weights by our names of them (`models.decoder`).

        Experts are one matrix: where they are not all stored alike, they are numbers.
        """
        found: dict[int | None, dict[str, StoredFormat | None]] = {}
        for name, stored in by_name.items():
            layer, part = _part(name)
            parts = found.setdefault(layer, {})
            parts[part] = stored if parts.get(part, stored) == stored else None
        last = max((layer for layer in found if layer is not None), default=-1)
        return cls(_formats(found.get(None, {})), tuple(_formats(found.get(layer, {})) for layer in range(last + 1)))

    def stored(self, name: str) -> StoredFormat | None:
        """How the weight of that name is stored; None: as numbers."""
        layer, part = _part(name)
        return dict(self.ends if layer is None else self.layer(layer)).get(part)

    def quantized_on_load(self, layers: int, stored: StoredFormat) -> WeightFormats:
        """The same, but for the matrices of all `layers` that are quantized into `stored` when they are loaded."""
        matrices = dict.fromkeys(MATRICES, stored)
        return WeightFormats(
            self.ends, tuple(frozenset((dict(self.layer(index)) | matrices).items()) for index in range(layers))
        )

    def layer(self, index: int) -> Formats:
        """Those of one layer."""
        return self.layers[index] if index < len(self.layers) else frozenset()

    @property
    def names(self) -> str:
        """Those that there are, for people: first the one that most weights have. Empty: there are none."""
        counts = Counter(stored.name for formats in (self.ends, *self.layers) for _, stored in formats)
        return ", ".join(sorted(counts, key=lambda name: (-counts[name], name)))


def _formats(parts: Mapping[str, StoredFormat | None]) -> Formats:
    return frozenset((part, stored) for part, stored in parts.items() if stored is not None)


_LAYER: Final = re.compile(r"layers\.(\d{1,9})\.(.*)")


def _part(name: str) -> tuple[int | None, str]:
    """``layers.3.experts.7.gate.weight`` → 3, ``experts.gate``. A bias is a part by its own name."""
    matrix = name.removesuffix(".weight")
    match = _LAYER.match(matrix)
    layer, part = (None, matrix) if match is None else (int(match[1]), match[2])
    return layer, re.sub(r"\.\d+\.", ".", part)


#: All weights are of the model's dtype.
ALL_NUMBERS: Final = WeightFormats()

#: Models of these are computed with a GGUF file's blocks, on CPUs that have our kernels; others dequantize them.
BLOCK_DTYPES: Final = ("float32", "bfloat16")
