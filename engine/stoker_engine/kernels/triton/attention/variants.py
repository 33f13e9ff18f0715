"""Layers of common models, for whose shapes attention kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from stoker_engine.kernels.triton.attention.arguments import (
    KeyValues,
    LayerShape,
    Paged,
    Queries,
    Scores,
    layer_shape,
)
from stoker_engine.kernels.triton.attention.attention_tiles import tiles_of
from stoker_engine.kernels.triton.common.float8 import E4M3, E5M2, INT8, PLAIN
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import ABSENT, KernelVariant

#: Shapes of layers: query heads, KV heads, head dimensions of keys and values.
_SHAPES: Final = {
    "64": (16, 8, 64, 64),
    "96": (32, 32, 96, 96),
    "128": (32, 8, 128, 128),
    "168": (25, 5, 168, 168),
    "256": (8, 4, 256, 256),
    "mla": (128, 1, 576, 512),
}
_BLOCK_SIZE: Final = 16
#: Window of layers with all options.
_WINDOW: Final = 128


def common_shape(gpu: GpuTarget) -> LayerShape:
    """Return the constants for decodes of a layer with heads of 128 in bfloat16."""
    tiles = tiles_of(128, torch.bfloat16, PLAIN, True, gpu)
    return layer_shape(*_SHAPES["128"], _BLOCK_SIZE, PLAIN, None, tiles)


def layer_variants(
    name: str,
    kernel: Any,
    are_decodes: bool,
    gpu: GpuTarget,
    tuples: Mapping[str, tuple[Any, ...]] | None = None,
    constants: Callable[[LayerShape], Mapping[str, object]] = lambda shape: {},
) -> Iterator[KernelVariant]:
    """Yield the variants of a kernel that common models need.

    Args:
        name: the variants' names start with it.
        tuples, constants: more arguments, see `KernelVariant.of`; constants may depend on the layer's.
    """

    def variant(shape: str, dtype: str, stored: str = "", has_all_options: bool = False) -> KernelVariant:
        sizes, code = _SHAPES[shape], _CODES[stored]
        torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        tiles = tiles_of(sizes[2], torch_dtype, code, are_decodes, gpu)
        made = layer_shape(*sizes, _BLOCK_SIZE, code, _WINDOW if has_all_options else None, tiles)
        element = f"*{dtype}" if code == PLAIN else "*u8"
        cached = Paged(element, "i32", "i32", "i32")
        scales = Paged("*fp32", "i32", "i32", "i32") if code != PLAIN else ABSENT
        optional = ("fp32", "*fp32", "*fp32") if has_all_options else (ABSENT,) * 3
        kinds = [dtype] * (stored == "" or dtype != "bf16") + [stored] * (stored != "")
        return KernelVariant.of(
            f"{name} {shape} {' '.join(kinds)}" + ", all a layer may have" * has_all_options,
            kernel,
            {**_POINTERS, "out": dtype},
            {"num_sequences": "i32"},
            {"SHAPE": made, **constants(made)},
            tiles.warps,
            tiles.stages,
            tensor_cores=dtype != "fp32",
            tuples={
                "queries": Queries(f"*{dtype}", "i32", "i32"),
                "cache": KeyValues(cached, cached, scales, scales),
                "scores": Scores("fp32", *optional),
                **(tuples or {}),
            },
        )

    for shape in _SHAPES:
        for stored in _CODES:
            if (stored in ("", "e4m3") and shape != "168") or shape == "128":
                yield variant(shape, "bf16", stored)
    yield variant("128", "fp32")
    yield variant("128", "fp16", has_all_options=True)
    yield variant("96", "fp16", "e4m3")
    yield variant("168", "bf16", "e5m2", has_all_options=True)
    yield variant("256", "fp32", "e4m3")


_CODES: Final = {"": PLAIN, "e4m3": E4M3, "e5m2": E5M2, "int8": INT8}
_POINTERS: Final = dict.fromkeys(
    ("tables", "query_starts", "seq_lens", "part_starts", "part_sequences", "counters"), "i32"
)
