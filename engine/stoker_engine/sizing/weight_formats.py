"""The weights of a model that are stored in blocks, and their formats.

A file may store only some matrices in blocks, and may use several formats. Matrices that one GEMM could merge (queries,
keys and values; gate and up projections) may differ in format. If a layer's experts do, they are dequantized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.stored_formats import StoredFormat

#: Pairs: a weight's name within a layer (``q``, ``down``, ``experts.gate``, ``shared.up``), or outside of layers
#: (``embed``); its format.
Formats = frozenset[tuple[str, StoredFormat]]


@dataclass(frozen=True)
class WeightFormats:
    """The formats of a model's weights. Weights without an entry have the model's dtype.

    Attributes:
        ends: formats of the weights outside of layers: ``embed``, ``lm_head``.
        layers: formats of each layer's weights; layers past the end of the tuple have none.
    """

    ends: Formats = frozenset()
    layers: tuple[Formats, ...] = ()

    @classmethod
    def of(cls, by_name: Mapping[str, StoredFormat | None]) -> WeightFormats:
        """Return the formats of weights that are named as in `models.decoder`.

        All experts of a layer have one entry, or none if their formats differ.
        """
        found: dict[int | None, dict[str, StoredFormat | None]] = {}
        for name, stored in by_name.items():
            layer, part = _part(name)
            parts = found.setdefault(layer, {})
            parts[part] = stored if parts.get(part, stored) == stored else None
        last = max((layer for layer in found if layer is not None), default=-1)
        return cls(_formats(found.get(None, {})), tuple(_formats(found.get(layer, {})) for layer in range(last + 1)))

    def stored(self, name: str) -> StoredFormat | None:
        """Return the format of the weight with that name, or None for the model's dtype."""
        layer, part = _part(name)
        return dict(self.ends if layer is None else self.layer(layer)).get(part)

    def replaced(self, others: WeightFormats) -> WeightFormats:
        """Return a copy in which the weights of layers that have a format in `others` have that one."""
        layers = range(max(len(self.layers), len(others.layers)))
        return WeightFormats(
            self.ends,
            tuple(frozenset({**dict(self.layer(index)), **dict(others.layer(index))}.items()) for index in layers),
        )

    def layer(self, index: int) -> Formats:
        """Return the formats of one layer's weights; empty if none is stored in blocks."""
        return self.layers[index] if index < len(self.layers) else frozenset()

    @property
    def counts(self) -> Counter[str]:
        """The number of weights in each format, by its name; a layer's experts count as one."""
        return Counter(stored.name for formats in (self.ends, *self.layers) for _, stored in formats)

    @property
    def names(self) -> str:
        """The names of all formats in use, most frequent first, for messages; empty if there are none."""
        counts = self.counts
        return ", ".join(sorted(counts, key=lambda name: (-counts[name], name)))


def _formats(parts: Mapping[str, StoredFormat | None]) -> Formats:
    return frozenset((part, stored) for part, stored in parts.items() if stored is not None)


_LAYER: Final = re.compile(r"layers\.(\d{1,9})\.(.*)")


def _part(name: str) -> tuple[int | None, str]:
    """Split ``layers.3.experts.7.gate.weight`` into 3 and ``experts.gate``. A bias keeps its ending."""
    matrix = name.removesuffix(".weight")
    match = _LAYER.match(matrix)
    layer, part = (None, matrix) if match is None else (int(match[1]), match[2])
    return layer, re.sub(r"\.\d+\.", ".", part)


#: All weights have the model's dtype.
ALL_NUMBERS: Final = WeightFormats()

#: Model dtypes for which CPU kernels compute directly with the blocks of a GGUF file; for others they are dequantized.
BLOCK_DTYPES: Final = ("float32", "bfloat16")
