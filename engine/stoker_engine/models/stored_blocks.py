"""Which weights of a file stay in its blocks, and the method that computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.kernels.native.library import native_library
from stoker_engine.models.weight_names import WeightNames, moves_rows
from stoker_engine.models.weight_source import WeightSource
from stoker_engine.quant.method import LinearMethod
from stoker_engine.quant.q8_0 import Q8_BLOCKS
from stoker_engine.sizing.block_weights import NO_BLOCKS, BlockWeights

#: Latent attention computes with it transposed, and a block is part of a row.
_TURNED: Final = ".k_b.weight"


def block_weights(
    source: WeightSource, spelling: WeightNames, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> BlockWeights:
    """The weights that stay in blocks, in a model of `dtype` on `device`: those that are stored so, where there is a
    kernel. The others are dequantized once, when they are loaded."""
    if native_library(device, dtype) is None or all(source.blocks(name) is None for name in source.names()):
        return NO_BLOCKS
    in_blocks, otherwise = list[str](), list[str]()
    for name in source.names():
        canonical = spelling.canonical(name)
        place = spelling.place(canonical, _EverySlot(), config)
        if place is None or spelling.is_ignored(canonical, config):
            continue
        whole_rows = len(source.shape(name)) > 1 and moves_rows(spelling.makes(canonical), place.split)
        stays = (
            source.blocks(name) is not None and whole_rows and not any(slot.endswith(_TURNED) for slot in place.slots)
        )
        (in_blocks if stays else otherwise).extend(place.slots)
    return BlockWeights.of(in_blocks, otherwise)


class _EverySlot:
    """All names: the model's own are not known before it is made. Matrices have one possible place each."""

    def __contains__(self, name: object) -> bool:
        return True


def with_blocks(
    blocks: BlockWeights, otherwise: Callable[[Sequence[str]], LinearMethod]
) -> Callable[[Sequence[str]], LinearMethod]:
    """See `Build.linear`: in blocks what is stored so."""
    return lambda slots: Q8_BLOCKS if blocks.hold(slots) else otherwise(slots)
