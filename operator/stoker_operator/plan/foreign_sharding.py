"""Tensor-parallel validation for vLLM: whether a model's matrices can be split evenly.

    column-parallel (q, k, v, gate, up)     columns ÷ shards   must be an integer, and a multiple of the block's columns
    row-parallel    (o, down)               rows ÷ shards      must be an integer, and a multiple of the block's rows

A block is a group of quantized weights that share a scale. The rules for Stoker's engine, which also splits unevenly,
are in `stoker_engine.sizing.sharding`.

vLLM finds such errors only when it loads the weights, minutes after a pod has started: in
``validate_fp8_block_shape``, in ``Fp8MoEMethod`` (its issue 25292: experts of 768 columns in four shards, with blocks
of 128) and in the group-size checks of AWQ, GPTQ and compressed-tensors. With one shard, vLLM checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.stored_formats import FileFormat
from stoker_engine.sizing.weight_formats import Formats, WeightFormats
from stoker_operator.plan.model_shapes import Shape

#: The block of a matrix that is not quantized.
_NUMBER: Final = (1, 1)
_EXPERTS: Final = frozenset({"experts.gate", "experts.up", "experts.down"})


class Split(NamedTuple):
    """A dimension of weight matrices that is sharded.

    Attributes:
        dimension: name of the dimension, in words.
        size: number of columns or rows.
        shards: number of shards.
        block: number of columns or rows that share a scale.
        of_experts: whether the matrices belong to routed experts, which could be distributed whole instead.
        stored: the checkpoint's quantization method if `block` is more than 1; only `uneven` sets it.
    """

    dimension: str
    size: int
    shards: int
    block: int = 1
    of_experts: bool = False
    stored: str = ""

    @property
    def even(self) -> bool:
        """Whether all shards have the same size and consist of whole blocks."""
        return self.shards == 1 or (self.size % self.shards == 0 and self.size // self.shards % self.block == 0)


def uneven(shape: Shape, formats: WeightFormats, tensor: int, expert_shards: int) -> Split | None:
    """Return the first dimension that cannot be split evenly, or None if all can.

    Args:
        shape, formats: the model, and the storage formats of its matrices.
        tensor: number of devices over which each layer is split.
        expert_shards: number of shards of each routed expert; 1 if experts stay whole.
    """
    kinds = {
        (id(layer.attention), id(layer.mlp), id(layer.moe), formats.layer(index)): layer
        for index, layer in enumerate(shape.config.layers)
    }
    found = (split for kind, layer in kinds.items() for split in _splits(layer, kind[-1], tensor, expert_shards))
    uneven = next((split for split in found if not split.even), None)
    return None if uneven is None else uneven._replace(stored=shape.method if uneven.block > 1 else "")


def _splits(layer: LayerConfig, formats: Formats, tensor: int, expert_shards: int) -> Iterator[Split]:
    blocks = {part: stored.block for part, stored in formats if isinstance(stored, FileFormat)}
    yield from _attention(layer.attention, blocks, tensor)
    if layer.moe is None:
        yield from (Split("the MLP's inner size", layer.mlp.size, tensor, block) for block in _mlp(blocks))
        return
    for block in _mlp(blocks, "experts."):
        # If only experts are quantized (gpt-oss), vLLM pads each shard to whole blocks.
        block = block if blocks.keys() - _EXPERTS else 1
        yield Split("each expert's inner size", layer.moe.intermediate_size, expert_shards, block, of_experts=True)
    if layer.moe.shared_intermediate_size:
        size = layer.moe.shared_intermediate_size
        yield from (Split("the shared experts' inner size", size, tensor, b) for b in _mlp(blocks, "shared."))


def _mlp(blocks: Mapping[str, tuple[int, int]], part: str = "") -> tuple[int, int]:
    """Return the block sizes along an MLP's intermediate size, of ``up`` and of ``down``."""
    return blocks.get(f"{part}up", _NUMBER)[0], blocks.get(f"{part}down", _NUMBER)[1]


def _attention(attention: AttentionConfig, blocks: Mapping[str, tuple[int, int]], tensor: int) -> Iterator[Split]:
    """Yield attention's splits that can cut a block. `plan.options` refuses layouts that cut a head."""
    queries, keys, rows = (blocks.get("q", _NUMBER)[0], blocks.get("k", _NUMBER)[0], blocks.get("o", _NUMBER)[1])
    values = attention.latent.v_head_dim if attention.latent else attention.value_head_dim or attention.head_dim
    if queries > 1 and attention.latent is None:
        yield Split("the queries' columns", attention.num_heads * attention.head_dim, tensor, queries)
    if keys > 1 and attention.latent is None and attention.num_kv_heads % tensor == 0:
        yield Split("the keys' columns", attention.num_kv_heads * attention.head_dim, tensor, keys)
    if rows > 1:
        yield Split("the attention output's rows", attention.num_heads * values, tensor, rows)
