"""Memory of LoRA adapters on a rank: the planner predicts with these sums, and the engine reserves as much.

    one operation    A [r × matrices, inputs]   +   for each matrix B [outputs, r]    of the shards on this rank

`r` is the LoRA rank.

An operation merges matrices, such as those of queries, keys and values. The sums are upper bounds: every matrix that
adapters may change has the maximum rank and its own A, although merged matrices may share one. The sums include the
router, which is replicated, the embedding, the head, and the projections next to them. Latent attention's ``k_b`` and
``v_b`` each have one A for all heads, and a B for each head.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.architectures.weight_names import EVERY_NAME
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.sharding import dealt, share_of
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, MatrixSize, Sharding, WeightSize, layer_sizes

#: Rows of a panel; kernels read whole panels, so numbers of rows are padded to a multiple of this.
PANEL: Final = 16

#: Matrix → first matrix of the operation that merges it.
_MERGED: Final = {
    "k": "q",
    "v": "q",
    "kv_a": "q_a",
    "up": "gate",
    "experts.up": "experts.gate",
    "shared.up": "shared.gate",
}


class AdapterMatrices(NamedTuple):
    """A and B of matrices of the same size, on one rank.

    Attributes:
        weight: name, as in `MatrixSize.weight`.
        inputs: columns of A.
        outputs: rows of B.
        matrices: number of matrices.
        in_panels: whether A and B are stored in panels for kernels; otherwise torch's operators read them.
    """

    weight: str
    inputs: int
    outputs: int
    matrices: int = 1
    in_panels: bool = True


def operation_bytes(merged: Sequence[AdapterMatrices], rank: int, element_bytes: int) -> int:
    """Return the bytes of A and B of the matrices that one operation merges, including padding."""
    if not merged[0].in_panels:
        return sum(each.matrices * rank * (each.inputs + each.outputs) for each in merged) * element_bytes
    even = rank + rank % 2
    rows, outputs = _padded(len(merged) * even), sum(_padded(each.outputs) for each in merged)
    return merged[0].matrices * (rows * merged[0].inputs + outputs * even) * element_bytes


def _padded(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def adapter_bytes(
    config: ModelConfig,
    rank: int,
    element_bytes: int,
    split: Sharding = ONE_DEVICE,
    formats: WeightFormats = ALL_NUMBERS,
    target_modules: Sequence[str] = (),
) -> list[int]:
    """Return the bytes of one adapter for each stage, on the device with most.

    Args:
        rank: LoRA rank (``--max-lora-rank``).
        element_bytes: bytes of one element of the adapter.
        split: devices of the engine.
        formats: formats of the model's weights, since shards begin at block boundaries.
        target_modules: see `changeable`.
    """
    allowed = changeable(config, target_modules)

    def total_of(found: Iterator[AdapterMatrices]) -> int:
        operations = dict[str, list[AdapterMatrices]]()
        for each in found:
            if each.weight in allowed:
                operations.setdefault(_MERGED.get(each.weight, each.weight), []).append(each)
        return sum(operation_bytes(merged, rank, element_bytes) for merged in operations.values())

    by_kind: dict[tuple[object, ...], int] = {}
    totals = []
    for stage, layers in enumerate(pipeline_stages(len(config.layers), split.pipeline)):
        total = total_of(_end_matrices(config, stage, split))
        for index in layers:
            layer, stored = config.layers[index], formats.layer(index)
            kind = id(layer.attention), id(layer.mlp), id(layer.moe), stored
            if kind not in by_kind:
                by_kind[kind] = total_of(_layer_matrices(config, layer, split, dict(stored)))
            total += by_kind[kind]
        totals.append(total)
    return totals


def changeable(config: ModelConfig, target_modules: Sequence[str]) -> Container[str]:
    """Return the names (`AdapterMatrices.weight`) of the matrices that adapters may change.

    Args:
        target_modules: last components of module names in adapter files; empty: all. A component that is not in the
            family's weight names may be any matrix; then all names are returned.
    """
    family = FAMILIES.get(config.architecture)
    if not target_modules or family is None:
        return EVERY_NAME
    parts_of = dict[str, set[str]]()
    for ours, theirs in family.weight_names.names.items():
        parts_of.setdefault(_last(theirs), set()).add(_plain(ours))
    for theirs, fused in family.weight_names.fused.items():
        # Adapter files may name a stack of experts by its parameter or by its module.
        for name in (theirs, theirs.rpartition(".")[0]) if fused.for_each else (theirs,):
            parts_of.setdefault(_last(name), set()).update(map(_plain, fused.parts))
    if not all(name in parts_of for name in target_modules):
        return EVERY_NAME
    return frozenset().union(*(parts_of[name] for name in target_modules))


def is_changeable(param_name: str, allowed: Container[str]) -> bool:
    """Whether adapters may change the matrix of a parameter, such as ``layers.3.experts.7.gate``.

    Args:
        allowed: result of `changeable`.
    """
    return re.sub(r"^layers\.\d+\.|\.\d+(?=\.)", "", param_name) in allowed


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _plain(name: str) -> str:
    """Convert a parameter name for `MatrixSize.weight`: ``layers.{i}.experts.{j}.gate.weight`` → ``experts.gate``."""
    return re.sub(r"^layers\.\{i\}\.|\.\{j\}", "", name.removesuffix(".weight"))


def _end_matrices(config: ModelConfig, stage: int, split: Sharding) -> Iterator[AdapterMatrices]:
    """Yield the matrices of the embedding, the head, and the projections between them and the layers."""
    hidden, vocabulary, width = config.hidden_size, config.vocab_size, config.decoder.embedding.size
    width = width or hidden
    first, last = stage == 0, stage == split.pipeline - 1
    # With tied embeddings the last stage also holds the embedding.
    if first or (last and config.tie_word_embeddings):
        yield AdapterMatrices("embed", vocabulary, width, in_panels=False)
    if last:
        yield AdapterMatrices("lm_head", width, share_of(vocabulary, split.tensor, 1, 0))
    if width != hidden:
        if first:
            yield AdapterMatrices("project_in", width, hidden)
        if last:
            yield AdapterMatrices("project_out", hidden, width)


def _layer_matrices(
    config: ModelConfig, layer: LayerConfig, split: Sharding, stored: Mapping[str, StoredFormat]
) -> Iterator[AdapterMatrices]:
    for size in layer_sizes(config, layer):
        if size.matrix is not None:
            multiple = stored[size.cut_like].column_multiple if size.cut_like in stored else 1
            yield _of_matrix(size, size.matrix, split, multiple)
    if layer.moe is not None:
        yield AdapterMatrices("router", config.hidden_size, layer.moe.num_experts)
        if layer.moe.shared_gate:
            yield AdapterMatrices("shared_gate", config.hidden_size, 1)


def _of_matrix(size: WeightSize, matrix: MatrixSize, split: Sharding, multiple: int) -> AdapterMatrices:
    if size.experts and split.expert > 1:
        return AdapterMatrices(matrix.weight, matrix.inner, matrix.rows, len(dealt(size.experts, split.expert, 0)))
    held = share_of(size.units, split.tensor, multiple, 0)
    if matrix.shared_out:
        # One A for all heads: its columns are the latent vector's elements.
        latent, each = (matrix.rows, matrix.inner) if matrix.weight == "k_b" else (matrix.inner, matrix.rows)
        return AdapterMatrices(matrix.weight, latent, held * each, in_panels=False)
    if matrix.cut_by_rows:
        return AdapterMatrices(matrix.weight, matrix.inner, matrix.rows // size.units * held, matrix.count)
    return AdapterMatrices(matrix.weight, matrix.inner // size.units * held, matrix.rows, matrix.count)
