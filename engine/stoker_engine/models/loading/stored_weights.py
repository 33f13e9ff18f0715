"""Which weights of a file stay in its blocks, and the methods that compute with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.models.families.weight_names import WeightNames, moves_rows
from stoker_engine.models.loading.weight_source import WeightSource
from stoker_engine.quant.blocks import Blocks
from stoker_engine.quant.method import LinearMethod
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

logger = logging.getLogger(__name__)

#: Latent attention computes with it transposed, and a block is part of a row.
_TURNED: Final = ".k_b.weight"


def stored_weights(
    source: WeightSource, spelling: WeightNames, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormats:
    """How the weights of a model of `dtype` on `device` are stored: in blocks where the file's can be computed with.
    The others are dequantized once, when they are loaded."""
    formats = {name: _usable(source.stored(name), dtype, device) for name in source.names()}
    if not any(formats.values()):
        return ALL_NUMBERS
    slots: dict[str, StoredFormat | None] = {}
    for name, stored in formats.items():
        canonical = spelling.canonical(name)
        place = spelling.place(canonical, _EverySlot(), config)
        if place is None or spelling.is_ignored(canonical, config):
            continue
        whole_rows = len(source.shape(name)) > 1 and moves_rows(spelling.makes(canonical), place.split)
        stays = whole_rows and not any(slot.endswith(_TURNED) for slot in place.slots)
        slots.update(dict.fromkeys(place.slots, stored if stays else None))
    found = WeightFormats.of(slots)
    stored_otherwise = {slot for slot, stored in slots.items() if stored is not None and found.stored(slot) is None}
    if layers := {slot.split(".")[1] for slot in stored_otherwise}:
        logger.info("experts of %d layers are not all stored alike, and are dequantized", len(layers))
    return found


def _usable(stored: StoredFormat | None, dtype: torch.dtype, device: torch.device) -> StoredFormat | None:
    """`stored`, if it is worth computing with."""
    if isinstance(stored, GGUFFormat):
        # Without a kernel, dequantizing it in every step would take far longer; and it must save something.
        smaller = stored.bytes < stored.numbers * dtype.itemsize
        return stored if smaller and cpu_library(device, dtype) is not None else None
    return stored


class _EverySlot:
    """All names: the model's own are not known before it is made. Matrices have one possible place each."""

    def __contains__(self, name: object) -> bool:
        return True


def with_formats(
    formats: WeightFormats, otherwise: Callable[[Sequence[str]], LinearMethod]
) -> Callable[[Sequence[str]], LinearMethod]:
    """See `Build.linear`: in blocks what is stored so."""

    def method(slots: Sequence[str]) -> LinearMethod:
        stored = formats.stored(slots[0])
        return otherwise(slots) if stored is None else Blocks(stored)

    return method
