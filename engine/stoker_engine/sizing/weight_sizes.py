"""Every tensor of a decoder, by size: the planner sums them before there is a model, and a model has exactly these.

Under tensor parallelism a matrix is split into its `units` (heads, columns, rows of the vocabulary); a shard holds its
share, rounded up, since a head is never divided. Norms are replicated. Under pipeline parallelism a stage holds its
layers (`sizing.pipeline_stages`), the first one the embedding besides, the last one the head. Under expert
parallelism whole experts are spread over the devices of all copies (tensor × data), instead of each being split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig, NormConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.block_weights import NO_BLOCKS, Q8_0, BlockWeights
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.quantized_weights import QuantizedWeights


@dataclass(frozen=True)
class WeightSize:
    """Some tensors.

    Attributes:
        numbers: how many numbers they hold together.
        units: into how many equal parts they can be split; 1: every shard holds all.
        wide: stored as float32 whatever the model's dtype.
        linear: matrices of a layer's attention or MLP, which are what quantization makes smaller.
        experts: how many routed experts of a layer they are; under expert parallelism whole ones are spread.
        matrix: the weights that are one matrix of the model, by the names of `block_weights`; empty: none that could
            stay in a file's blocks.
        cut_by: the weight whose rows the units are cut out of; where it is in blocks, between them only.
    """

    numbers: int
    units: int = 1
    wide: bool = False
    linear: bool = False
    experts: int = 0
    matrix: tuple[str, ...] = ()
    cut_by: str = ""


@dataclass(frozen=True)
class Sharding:
    """Over how many devices one copy of a model is spread.

    Attributes:
        tensor: devices each layer is split over.
        pipeline: stages the layers are spread over.
        expert: devices that whole experts are spread over; 1: every expert is split over `tensor`, as the rest is.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


ONE_DEVICE = Sharding()


def weight_bytes(
    config: ModelConfig,
    element_bytes: int,
    tensor: int = 1,
    *,
    sharding: Sharding | None = None,
    quantized: QuantizedWeights | None = None,
    blocks: BlockWeights = NO_BLOCKS,
) -> int:
    """Weights on the device that holds most of them.

    Args:
        config: the model.
        element_bytes: of one number that is not quantized.
        tensor: the tensor-parallel size, where nothing else is split.
        sharding: how the model is split, in all.
        quantized: how the matrices of the layers are stored; None: as all other weights are.
        blocks: the matrices that stay in a GGUF file's blocks.
    """
    split = sharding or Sharding(tensor)
    stages = range(split.pipeline)
    return max(stage_weight_bytes(config, stage, element_bytes, split, quantized, blocks) for stage in stages)


def stage_weight_bytes(
    config: ModelConfig,
    stage: int,
    element_bytes: int,
    split: Sharding = ONE_DEVICE,
    quantized: QuantizedWeights | None = None,
    blocks: BlockWeights = NO_BLOCKS,
) -> int:
    """Weights on each device of one pipeline stage."""
    if config.num_weights is not None:
        # Where the parts do not determine it, everything is taken to be matrices of equal layers.
        share = -(-config.num_weights // (split.tensor * split.pipeline))
        return share * element_bytes if quantized is None else quantized.stored_bytes(share)
    # Most models have one or two kinds of layers, and many of each.
    layers = {index: config.layers[index] for index in pipeline_stages(len(config.layers), split.pipeline)[stage]}
    kinds = {(_kind(layer), blocks.layer(index)): layer for index, layer in layers.items()}
    counts = Counter((_kind(layer), blocks.layer(index)) for index, layer in layers.items())

    def total(sizes: Iterator[WeightSize], in_blocks: frozenset[str]) -> int:
        return sum(_bytes(size, element_bytes, split, quantized, in_blocks) for size in sizes)

    ends = total(_end_sizes(config, stage, split.pipeline), blocks.ends)
    return ends + sum(counts[kind] * total(_layer_sizes(config, layer), kind[1]) for kind, layer in kinds.items())


def weight_sizes(config: ModelConfig) -> Iterator[WeightSize]:
    """The sizes of all tensors of the model."""
    return stage_sizes(config, 0, 1)


def stage_sizes(config: ModelConfig, stage: int, stages: int) -> Iterator[WeightSize]:
    """The sizes of the tensors of one pipeline stage."""
    yield from _end_sizes(config, stage, stages)
    for index in pipeline_stages(len(config.layers), stages)[stage]:
        yield from _layer_sizes(config, config.layers[index])


def _end_sizes(config: ModelConfig, stage: int, stages: int) -> Iterator[WeightSize]:
    """What the first and the last stage have beside layers."""
    hidden, vocabulary, decoder = config.hidden_size, config.vocab_size, config.decoder
    width = decoder.embedding.size or hidden
    first, last = stage == 0, stage == stages - 1
    if first:
        yield WeightSize(vocabulary * width, units=vocabulary, matrix=("embed",))
        yield WeightSize(decoder.embedding.positions * hidden)
        yield _norm(decoder.norm, decoder.embedding.norm * hidden)
        yield WeightSize(config.encoder_weights)
    if last:
        # A head that is tied to the embedding is that same matrix, which the last stage needs as well as the first.
        if not config.tie_word_embeddings or not first:
            matrix = "embed" if config.tie_word_embeddings else "lm_head"
            yield WeightSize(vocabulary * width, units=vocabulary, matrix=(matrix,))
        if decoder.head.bias:
            yield WeightSize(vocabulary, units=vocabulary)
        yield _norm(decoder.norm, decoder.final_norm * hidden)
    if width != hidden:
        yield WeightSize((first + last) * width * hidden)


def _layer_sizes(config: ModelConfig, layer: LayerConfig) -> Iterator[WeightSize]:
    decoder = config.decoder
    yield _norm(decoder.norm, len(decoder.residual.norms) * config.hidden_size)
    yield from _attention(layer.attention, config.hidden_size, decoder.norm)
    yield from _mlp(layer, config.hidden_size)


def _kind(layer: LayerConfig) -> tuple[int, int, int]:
    """The same for layers of the same parts; to compare the parts themselves would take longer than to add them up."""
    return id(layer.attention), id(layer.mlp), id(layer.moe)


def _bytes(
    size: WeightSize,
    element_bytes: int,
    split: Sharding,
    quantized: QuantizedWeights | None,
    in_blocks: frozenset[str],
) -> int:
    """What a device's share takes."""
    spread = size.experts and split.expert > 1
    units, parts = (size.experts, split.expert) if spread else (size.units, split.tensor)
    multiple = Q8_0.numbers if size.cut_by in in_blocks and not spread else 1
    share = size.numbers // units * min(-(-units // (parts * multiple)) * multiple, units)
    if size.matrix and in_blocks.issuperset(size.matrix):
        return Q8_0.stored_bytes(share)
    if quantized is not None and size.linear and (size.experts or not quantized.experts_only):
        return quantized.stored_bytes(share)
    return share * (4 if size.wide else element_bytes)


def _attention(attention: AttentionConfig, hidden: int, norm: NormConfig) -> Iterator[WeightSize]:
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    latent = attention.latent
    if latent is not None:
        bottleneck = latent.q_lora_rank or 0
        cached = latent.kv_lora_rank + latent.qk_rope_head_dim
        into = ("q_a", "kv_a") if bottleneck else ("kv_a",)
        yield WeightSize((bottleneck + cached) * hidden, linear=True, matrix=into)
        yield WeightSize((bottleneck + cached) * attention.qkv_bias, linear=True)
        yield _norm(norm, bottleneck + latent.kv_lora_rank)
        yield _matrix(("q_b" if bottleneck else "q",), (bottleneck or hidden) * heads * latent.qk_head_dim, heads)
        yield _matrix(("k_b",), latent.kv_lora_rank * heads * latent.qk_nope_head_dim, heads)
        yield _matrix(("v_b",), latent.kv_lora_rank * heads * latent.v_head_dim, heads)
        yield _matrix(("o",), heads * latent.v_head_dim * hidden, heads)
    else:
        qkv = ("q", "k", "v")
        yield _matrix(qkv, heads * size * hidden, heads)
        yield _matrix(qkv, 2 * kv_heads * size * hidden, kv_heads)
        if attention.qkv_bias:
            yield _matrix((), heads * size, heads)
            yield _matrix((), 2 * kv_heads * size, kv_heads)
        yield _matrix(("o",), heads * size * hidden, heads)
    if attention.out_bias:
        yield WeightSize(hidden)
    if attention.qk_norm is not None:
        sizes = 2 if attention.qk_norm.over == "head" else heads + kv_heads
        yield _norm(attention.qk_norm.norm, sizes * size)


def _mlp(layer: LayerConfig, hidden: int) -> Iterator[WeightSize]:
    moe, mlp = layer.moe, layer.mlp
    if moe is not None:
        shared = 3 * moe.shared_intermediate_size * hidden
        routed = moe.weights(hidden) - shared - moe.num_experts * hidden - moe.shared_gate * hidden
        for weights, share in ((("experts.gate", "experts.up"), routed // 3 * 2), (("experts.down",), routed // 3)):
            yield WeightSize(
                share,
                units=moe.intermediate_size,
                linear=True,
                experts=moe.num_experts,
                matrix=weights,
                cut_by="experts.down",
            )
        if shared:
            units = moe.shared_intermediate_size
            yield _matrix(("shared.gate", "shared.up"), shared // 3 * 2, units, "shared.down")
            yield _matrix(("shared.down",), shared // 3, units, "shared.down")
        yield WeightSize((moe.num_experts + moe.shared_gate) * hidden)
        if moe.correction_bias:
            yield WeightSize(moe.num_experts, wide=True)
        return
    up = ("gate", "up") if mlp.gated else ("up",)
    yield _matrix(up, len(up) * mlp.size * hidden, mlp.size, "down")
    yield _matrix(("down",), mlp.size * hidden, mlp.size, "down")
    if mlp.bias:
        yield WeightSize(len(up) * mlp.size, units=mlp.size, cut_by="down")
        yield WeightSize(hidden)


def _matrix(weights: tuple[str, ...], numbers: int, units: int, cut_by: str = "") -> WeightSize:
    return WeightSize(numbers, units=units, linear=True, matrix=weights, cut_by=cut_by)


def _norm(norm: NormConfig, numbers: int) -> WeightSize:
    return WeightSize((norm.weight + norm.bias) * numbers, wide=norm.wide)
