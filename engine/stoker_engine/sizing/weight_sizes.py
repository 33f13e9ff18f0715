"""Sizes of all tensors of a decoder. The planner adds them up before the model is loaded; a loaded model has exactly
these tensors.

Tensor parallelism splits a matrix by its `units` (heads, columns, rows of the vocabulary). A shard holds a whole number
of units, rounded up. Norms are replicated. With pipeline parallelism a stage holds its layers
(`sizing.pipeline_stages`), the first one also the embedding, the last one also the head. With expert parallelism each
device holds whole experts: in Stoker the experts are spread over the devices of one data-parallel engine, in other
runtimes over those of all engines (tensor × data).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig, NormConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.quantized_weights import QuantizedWeights
from stoker_engine.sizing.sharding import dealt, share_of
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, Formats, WeightFormats

#: Limit on the experts of all layers together; real models have tens of thousands.
_MOST_EXPERTS: Final = 200_000


@dataclass(frozen=True)
class MatrixSize:
    """A matrix, or several of the same size, that may be stored in blocks.

    Attributes:
        weight: name, as in `weight_formats`.
        rows: number of rows (outputs).
        inner: number of columns (inputs); blocks lie along this dimension.
        cut_by_rows: whether tensor parallelism splits the rows; otherwise it splits the columns.
        count: number of matrices: a layer's routed experts, the heads of latent attention, or 1.
        shared_out: whether each device holds some whole matrices instead of a shard of every matrix.
    """

    weight: str
    rows: int
    inner: int
    cut_by_rows: bool
    count: int = 1
    shared_out: bool = False


@dataclass(frozen=True)
class WeightSize:
    """Size of one or several tensors.

    Attributes:
        numbers: number of elements of all of them.
        units: number of equal parts they can be split into; 1: replicated on every rank.
        wide: whether they are float32 whatever the model's dtype.
        linear: whether `QuantizedWeights` applies to them: matrices of attention, MLP and experts, and QKV biases.
        experts: number of routed experts they belong to, which expert parallelism spreads over devices; 0: none.
        matrix: their shape as a matrix; None if they are never stored in blocks.
        cut_like: name of the weight at whose block boundaries the shards begin; empty: at any unit.
    """

    numbers: int
    units: int = 1
    wide: bool = False
    linear: bool = False
    experts: int = 0
    matrix: MatrixSize | None = None
    cut_like: str = ""


@dataclass(frozen=True)
class Sharding:
    """The devices of one engine.

    Attributes:
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        expert: expert-parallel size; 1: every expert is split over `tensor` devices.
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
    formats: WeightFormats = ALL_NUMBERS,
) -> int:
    """Return the bytes of the weights on the device that holds most of them.

    Args:
        element_bytes: bytes of one element that is not quantized.
        tensor: tensor-parallel size if `sharding` is None.
        sharding: devices of the engine.
        quantized: format of the layers' matrices; None: the model's dtype.
        formats: formats of the matrices that are stored in blocks.
    """
    split = sharding or Sharding(tensor)
    stages = range(split.pipeline)
    return max(stage_weight_bytes(config, stage, element_bytes, split, quantized, formats) for stage in stages)


def stage_weight_bytes(
    config: ModelConfig,
    stage: int,
    element_bytes: int,
    split: Sharding = ONE_DEVICE,
    quantized: QuantizedWeights | None = None,
    formats: WeightFormats = ALL_NUMBERS,
    rank: int = 0,
) -> int:
    """Return the bytes of the weights on one device of a pipeline stage.

    Args:
        element_bytes, quantized, formats: see `weight_bytes`.
        stage: index of the stage.
        split: devices of the engine.
        rank: index of the device within the stage; device 0 holds most.
    """
    if config.num_weights is not None:
        # Only the total is known: all weights are taken as matrices, distributed equally over the devices.
        share = -(-config.num_weights // (split.tensor * split.pipeline))
        return share * element_bytes if quantized is None else quantized.stored_bytes(share)
    # Most models have one or two kinds of layers: the sizes of each kind are added up once.
    layers = {index: config.layers[index] for index in pipeline_stages(len(config.layers), split.pipeline)[stage]}
    kinds = {(_kind(layer), formats.layer(index)): layer for index, layer in layers.items()}
    counts = Counter((_kind(layer), formats.layer(index)) for index, layer in layers.items())

    def total(sizes: Iterator[WeightSize], stored: Formats) -> int:
        by_weight = dict(stored)
        return sum(_bytes(size, element_bytes, split, quantized, by_weight, rank) for size in sizes)

    ends = total(_end_sizes(config, stage, split.pipeline), formats.ends)
    return ends + sum(counts[kind] * total(layer_sizes(config, layer), kind[1]) for kind, layer in kinds.items())


def weight_sizes(config: ModelConfig) -> Iterator[WeightSize]:
    """Yield the sizes of all tensors of the model."""
    return stage_sizes(config, 0, 1)


def matrices(
    config: ModelConfig, experts: Callable[[int, int], Iterable[int]] = lambda layer, count: range(count)
) -> Iterator[tuple[str, MatrixSize]]:
    """Yield the matrices that may be stored in blocks, by the names of `models.decoder` without ``.weight``.

    Args:
        experts: function (layer index, number of experts) → the experts to yield; all by default.

    Raises:
        ModelError: the model states too many experts.
    """
    if sum(layer.moe.num_experts for layer in config.layers if layer.moe is not None) > _MOST_EXPERTS:
        raise ModelError(
            f"config.json: the model has more than {_MOST_EXPERTS} experts; the file may be damaged, download it again"
        )
    for size in _end_sizes(config, 0, 1):
        if size.matrix is not None:
            yield size.matrix.weight, size.matrix
    kinds = {_kind(layer): list(layer_sizes(config, layer)) for layer in config.layers}
    for index, layer in enumerate(config.layers):
        for size in kinds[_kind(layer)]:
            if size.matrix is not None:
                weight = size.matrix.weight
                for expert in experts(index, size.experts) if size.experts else (0,):
                    part = weight.replace("experts.", f"experts.{expert}.") if size.experts else weight
                    yield f"layers.{index}.{part}", size.matrix


def stage_sizes(config: ModelConfig, stage: int, stages: int) -> Iterator[WeightSize]:
    """Yield the sizes of the tensors of one pipeline stage."""
    yield from _end_sizes(config, stage, stages)
    for index in pipeline_stages(len(config.layers), stages)[stage]:
        yield from layer_sizes(config, config.layers[index])


def _end_sizes(config: ModelConfig, stage: int, stages: int) -> Iterator[WeightSize]:
    """Yield the tensors outside of layers that this stage holds; only the first and the last stage have any."""
    hidden, vocabulary, decoder = config.hidden_size, config.vocab_size, config.decoder
    width = decoder.embedding.size or hidden
    first, last = stage == 0, stage == stages - 1
    if first:
        yield _table("embed", vocabulary, width)
        yield WeightSize(decoder.embedding.positions * hidden)
        yield _norm(decoder.norm, decoder.embedding.norm * hidden)
        yield WeightSize(config.encoder_weights)
    if last:
        # If the head is tied to the embedding, the last stage holds a copy of the embedding, unless it is also first.
        if not config.tie_word_embeddings or not first:
            yield _table("embed" if config.tie_word_embeddings else "lm_head", vocabulary, width)
        if decoder.head.bias:
            yield WeightSize(vocabulary, units=vocabulary)
        yield _norm(decoder.norm, decoder.final_norm * hidden)
    if width != hidden:
        yield WeightSize((first + last) * width * hidden)


def _table(weight: str, vocabulary: int, width: int) -> WeightSize:
    """Return the size of the embedding or the head."""
    matrix = MatrixSize(weight, vocabulary, width, cut_by_rows=True)
    return WeightSize(vocabulary * width, units=vocabulary, matrix=matrix)


def layer_sizes(config: ModelConfig, layer: LayerConfig) -> Iterator[WeightSize]:
    """Yield the sizes of the tensors of a layer."""
    decoder = config.decoder
    yield _norm(decoder.norm, len(decoder.residual.norms) * config.hidden_size)
    yield from _attention(layer.attention, config.hidden_size, decoder.norm)
    yield from _mlp(layer, config.hidden_size)


def _kind(layer: LayerConfig) -> tuple[int, int, int]:
    """Return a key that is equal for layers that share their parts. Comparing the parts themselves would be slower than
    adding up their sizes."""
    return id(layer.attention), id(layer.mlp), id(layer.moe)


def _bytes(
    size: WeightSize,
    element_bytes: int,
    split: Sharding,
    quantized: QuantizedWeights | None,
    stored: Mapping[str, StoredFormat],
    rank: int,
) -> int:
    """Return the bytes of a device's shard of the tensors that `size` describes."""
    spread = size.experts and split.expert > 1
    units, parts = (size.experts, split.expert) if spread else (size.units, split.tensor)
    multiple = stored[size.cut_like].column_multiple if size.cut_like in stored and not spread else 1
    held = len(dealt(units, parts, rank)) if spread else share_of(units, parts, multiple, rank)
    if size.matrix is not None and size.matrix.weight in stored:
        return _stored_bytes(size.matrix, stored[size.matrix.weight], held, units, whole_ones=bool(spread))
    share = size.numbers // units * held
    if quantized is not None and size.linear:
        return quantized.stored_bytes(share)
    return share * (4 if size.wide else element_bytes)


def _stored_bytes(matrix: MatrixSize, stored: StoredFormat, held: int, units: int, *, whole_ones: bool) -> int:
    """Return the bytes of `held` of a matrix's `units`, stored in blocks. If `whole_ones`, a unit is a whole matrix."""
    rows, inner, count = matrix.rows, matrix.inner, matrix.count
    if whole_ones or matrix.shared_out:
        count = count // units * held
    elif matrix.cut_by_rows:
        rows = rows // units * held
    else:
        inner = inner // units * held
    return count * stored.matrix_bytes(rows, inner)


def _attention(attention: AttentionConfig, hidden: int, norm: NormConfig) -> Iterator[WeightSize]:
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    latent = attention.latent
    if latent is not None:
        bottleneck, rank = latent.q_lora_rank or 0, latent.kv_lora_rank
        cached = rank + latent.qk_rope_head_dim
        if bottleneck:
            yield _matrix("q_a", bottleneck, hidden)
        yield _matrix("kv_a", cached, hidden)
        yield WeightSize((bottleneck + cached) * attention.qkv_bias, linear=True)
        yield _norm(norm, bottleneck + rank)
        query = "q_b" if bottleneck else "q"
        yield _matrix(query, heads * latent.qk_head_dim, bottleneck or hidden, heads)
        yield _matrix("k_b", rank, latent.qk_nope_head_dim, heads, count=heads)
        yield _matrix("v_b", latent.v_head_dim, rank, heads, count=heads)
        yield _matrix("o", hidden, heads * latent.v_head_dim, heads, by_rows=False)
    else:
        yield _matrix("q", heads * size, hidden, heads)
        yield _matrix("k", kv_heads * size, hidden, kv_heads)
        yield _matrix("v", kv_heads * size, hidden, kv_heads)
        if attention.qkv_bias:
            yield WeightSize(heads * size, heads, linear=True)
            yield WeightSize(2 * kv_heads * size, kv_heads, linear=True)
        yield _matrix("o", hidden, heads * size, heads, by_rows=False)
    if attention.out_bias:
        yield WeightSize(hidden)
    if attention.sinks:
        yield WeightSize(heads, heads, wide=True)
    if attention.qk_norm is not None:
        sizes = 2 if attention.qk_norm.over == "head" else heads + kv_heads
        yield _norm(attention.qk_norm.norm, sizes * size)


def _mlp(layer: LayerConfig, hidden: int) -> Iterator[WeightSize]:
    moe, mlp = layer.moe, layer.mlp
    if moe is not None:
        yield from _gated("experts", moe.intermediate_size, hidden, moe.num_experts)
        if moe.shared_intermediate_size:
            yield from _gated("shared", moe.shared_intermediate_size, hidden)
        if moe.bias:
            gates = 2 * moe.num_experts * moe.intermediate_size
            yield WeightSize(gates, moe.intermediate_size, experts=moe.num_experts, cut_like="experts.down")
            yield WeightSize(moe.num_experts * hidden, experts=moe.num_experts)
        yield WeightSize((moe.num_experts + moe.shared_gate) * hidden)
        if moe.router_bias:
            yield WeightSize(moe.num_experts)
        if moe.correction_bias:
            yield WeightSize(moe.num_experts, wide=True)
        return
    for part in ("gate", "up") if mlp.gated else ("up",):
        yield _matrix(part, mlp.size, hidden, mlp.size, cut_like="down")
    yield _matrix("down", hidden, mlp.size, mlp.size, by_rows=False, cut_like="down")
    if mlp.bias:
        yield WeightSize((1 + mlp.gated) * mlp.size, units=mlp.size, cut_like="down")
        yield WeightSize(hidden)


def _gated(name: str, size: int, hidden: int, experts: int = 0) -> Iterator[WeightSize]:
    """Yield the matrices of a gated MLP, or of `experts` of them."""
    down = f"{name}.down"
    for part in (f"{name}.gate", f"{name}.up"):
        yield _matrix(part, size, hidden, size, cut_like=down, experts=experts)
    yield _matrix(down, hidden, size, size, by_rows=False, cut_like=down, experts=experts)


def _matrix(
    weight: str,
    rows: int,
    inner: int,
    units: int = 1,
    *,
    by_rows: bool = True,
    cut_like: str = "",
    count: int = 0,
    experts: int = 0,
) -> WeightSize:
    """Return the size of a layer's matrix.

    Args:
        count: number of matrices, if each device holds some of them whole (`MatrixSize.shared_out`); otherwise 0.
        experts: number of routed experts with such a matrix each; 0: the matrix does not belong to experts.
    """
    matrix = MatrixSize(weight, rows, inner, by_rows, count or experts or 1, shared_out=bool(count))
    return WeightSize(
        matrix.count * rows * inner, units, linear=True, experts=experts, matrix=matrix, cut_like=cut_like
    )


def _norm(norm: NormConfig, numbers: int) -> WeightSize:
    return WeightSize((norm.weight + norm.bias) * numbers, wide=norm.wide)
