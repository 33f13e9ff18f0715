"""Every tensor of a decoder, by size: the planner sums them before there is a model, and a model has exactly these.

Under tensor parallelism a matrix is split into its `units` (heads, columns, rows of the vocabulary); a shard holds its
share, rounded up, since a head is never divided. Norms are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker_engine.contract.decoder_config import AttentionConfig, LayerConfig, NormConfig
from stoker_engine.contract.model_config import ModelConfig


@dataclass(frozen=True)
class WeightSize:
    """Some tensors.

    Attributes:
        numbers: how many numbers they hold together.
        units: into how many equal parts they can be split; 1: every shard holds all.
        wide: stored as float32 whatever the model's dtype.
    """

    numbers: int
    units: int = 1
    wide: bool = False


def weight_bytes(config: ModelConfig, element_bytes: int, tensor: int = 1) -> int:
    """Weights of one tensor-parallel shard."""
    if config.num_weights is not None:
        return -(-config.num_weights // tensor) * element_bytes
    return sum(
        size.numbers // size.units * -(-size.units // tensor) * (4 if size.wide else element_bytes)
        for size in weight_sizes(config)
    )


def weight_sizes(config: ModelConfig) -> Iterator[WeightSize]:
    """The sizes of all tensors of the model."""
    hidden, vocabulary, decoder = config.hidden_size, config.vocab_size, config.decoder
    width = decoder.embedding.size or hidden
    yield WeightSize(vocabulary * width, units=vocabulary)
    if not config.tie_word_embeddings:
        yield WeightSize(vocabulary * width, units=vocabulary)
    if decoder.head.bias:
        yield WeightSize(vocabulary, units=vocabulary)
    if width != hidden:
        yield WeightSize(2 * width * hidden)
    yield WeightSize(decoder.embedding.positions * hidden)
    norms = decoder.embedding.norm + decoder.final_norm + len(decoder.layers) * len(decoder.residual.norms)
    yield _norm(decoder.norm, norms * hidden)
    for layer in decoder.layers:
        yield from _attention(layer.attention, hidden, decoder.norm)
        yield from _mlp(layer, hidden)


def _attention(attention: AttentionConfig, hidden: int, norm: NormConfig) -> Iterator[WeightSize]:
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    inputs = hidden + attention.qkv_bias
    latent = attention.latent
    if latent is not None:
        bottleneck = latent.q_lora_rank or 0
        cached = latent.kv_lora_rank + latent.qk_rope_head_dim
        yield WeightSize((bottleneck + cached) * inputs)
        yield _norm(norm, bottleneck + latent.kv_lora_rank)
        yield WeightSize((bottleneck or hidden) * heads * latent.qk_head_dim, units=heads)
        yield WeightSize(latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim), units=heads)
        yield WeightSize(heads * latent.v_head_dim * hidden, units=heads)
    else:
        yield WeightSize(heads * size * inputs, units=heads)
        yield WeightSize(2 * kv_heads * size * inputs, units=kv_heads)
        yield WeightSize(heads * size * hidden, units=heads)
    if attention.out_bias:
        yield WeightSize(hidden)
    if attention.qk_norm is not None:
        sizes = 2 if attention.qk_norm.over == "head" else heads + kv_heads
        yield _norm(attention.qk_norm.norm, sizes * size)


def _mlp(layer: LayerConfig, hidden: int) -> Iterator[WeightSize]:
    moe, mlp = layer.moe, layer.mlp
    if moe is not None:
        shared = 3 * moe.shared_intermediate_size * hidden
        yield WeightSize(
            moe.weights(hidden) - shared - moe.num_experts * hidden - moe.shared_gate * hidden, moe.num_experts
        )
        yield WeightSize(shared, units=moe.shared_intermediate_size or 1)
        yield WeightSize((moe.num_experts + moe.shared_gate) * hidden)
        if moe.correction_bias:
            yield WeightSize(moe.num_experts, wide=True)
        return
    matrices = 3 if mlp.gated else 2
    yield WeightSize(matrices * mlp.size * hidden, units=mlp.size)
    if mlp.bias:
        yield WeightSize((matrices - 1) * mlp.size, units=mlp.size)
        yield WeightSize(hidden)


def _norm(norm: NormConfig, numbers: int) -> WeightSize:
    return WeightSize((norm.weight + norm.bias) * numbers, wide=norm.wide)
