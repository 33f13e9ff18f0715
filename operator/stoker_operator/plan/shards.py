"""Whether a model's matrices come out even when they are split: by columns and rows, and by the blocks of numbers that
share a scale where weights are quantized.

    column-parallel (q, k, v, gate, up)     columns ÷ shards   must be whole, and whole blocks of the scale's columns
    row-parallel    (o, down)               rows ÷ shards      must be whole, and whole blocks of the scale's rows

Our own engine divides models by rules of its own (`stoker_engine.sizing.divisible`), and splits unevenly too.

An engine finds that out when it loads the weights, minutes after a pod was started: vLLM's
``validate_fp8_block_shape``, ``Fp8MoEMethod`` (its issue 25292: experts of 768 columns in four parts, by blocks of
128) and the group-size checks of AWQ, GPTQ and compressed-tensors. Only what is split is judged: one shard is the
checkpoint's own matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.sizing.quantized_weights import QuantizedWeights
from stoker_operator.plan.model_shapes import Shape


class Split(NamedTuple):
    """Matrices that are split.

    Attributes:
        what: whose columns or rows these are.
        size: how many there are.
        shards: into how many parts they are split.
        block: so many share a scale.
        of_experts: they are the routed experts', which could be dealt whole instead.
        stored: how they are stored; empty: as numbers.
    """

    what: str
    size: int
    shards: int
    block: int = 1
    of_experts: bool = False
    stored: str = ""

    @property
    def even(self) -> bool:
        """Whether every part is whole."""
        return self.shards == 1 or (self.size % self.shards == 0 and self.size // self.shards % self.block == 0)


def uneven(shape: Shape, quantized: QuantizedWeights | None, tensor: int, expert_shards: int) -> Split | None:
    """The first matrices whose shards are not whole; None where all are.

    Args:
        shape: the model.
        quantized: how its matrices are stored; None: as all other weights.
        tensor: devices each layer is split over.
        expert_shards: parts that each routed expert is split into; 1: experts stay whole.
    """
    kinds = {(id(layer.attention), id(layer.mlp), id(layer.moe)): layer for layer in shape.config.layers}
    found = (split for layer in kinds.values() for split in _splits(layer, quantized, tensor, expert_shards))
    uneven = next((split for split in found if not split.even), None)
    return None if uneven is None else uneven._replace(stored=quantized.method if quantized else "")


def _splits(layer: LayerConfig, quantized: QuantizedWeights | None, tensor: int, expert_shards: int) -> Iterator[Split]:
    columns, rows = quantized.block if quantized else (1, 1)
    inner = (1, 1) if quantized and quantized.experts_only else (columns, rows)
    yield from _attention(layer.attention, inner, tensor)
    if layer.moe is None:
        yield from (Split("the MLP's inner size", layer.mlp.size, tensor, block) for block in inner)
        return
    for block in (columns, rows):
        # Where experts alone are stored so, runtimes pad them (gpt-oss).
        block = 1 if quantized and quantized.experts_only else block
        yield Split("each expert's inner size", layer.moe.intermediate_size, expert_shards, block, of_experts=True)
    if layer.moe.shared_intermediate_size:
        yield from (
            Split("the shared experts' inner size", layer.moe.shared_intermediate_size, tensor, b) for b in inner
        )


def _attention(attention: AttentionConfig, block: tuple[int, int], tensor: int) -> Iterator[Split]:
    """Heads are whole on every device (`plan.options`), so only blocks of several heads can be parted."""
    columns, rows = block
    values = attention.latent.v_head_dim if attention.latent else attention.value_head_dim or attention.head_dim
    if columns > 1 and attention.latent is None:
        yield Split("the queries' columns", attention.num_heads * attention.head_dim, tensor, columns)
        if attention.num_kv_heads % tensor == 0:
            yield Split("the keys' columns", attention.num_kv_heads * attention.head_dim, tensor, columns)
    if rows > 1:
        yield Split("the attention output's rows", attention.num_heads * values, tensor, rows)
