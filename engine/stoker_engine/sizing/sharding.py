"""Tensor- and pipeline-parallel validation: whether ranks can share a model.

The planner (`stoker_operator.plan.options`) and the engine, before it starts any rank (`exec.check_sharding`), both
apply these rules. The rules of other runtimes are in `stoker_operator.plan.foreign_sharding`.

    heads                     the same number on each rank; a key-value head may be replicated on several ranks
    inner sizes, vocabulary   contiguous shards, the first ones largest; no rank may be empty
    whole experts             spread evenly: the first ranks may have one more; each rank has at least one
    rows in blocks            split between blocks; not split at all if columns are in activation order
    layers                    at least one for each stage

`layers.build` shards layers by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

#: Maximum tensor-parallel size that messages suggest.
_MOST: Final = 64


class Objection(NamedTuple):
    """Why a model cannot be sharded as requested.

    Attributes:
        reason: CamelCase, for programs.
        message: sentence without the remedy.
    """

    reason: str
    message: str


def objection(
    config: ModelConfig,
    tensor: int,
    pipeline: int = 1,
    *,
    whole_experts: bool = False,
    formats: WeightFormats = ALL_NUMBERS,
) -> Objection | None:
    """Return why a model cannot run on `tensor` × `pipeline` ranks, or None if it can.

    Args:
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        whole_experts: whether the tensor-parallel ranks hold whole experts (expert parallelism) instead of a shard of
            each expert.
    """
    if config.num_weights is not None and (tensor * pipeline > 1 or whole_experts):
        return not_split(config.architecture)
    if whole_experts and not any(layer.moe for layer in config.layers):
        return Objection("NotMixtureOfExperts", "the model is not a mixture of experts")
    if pipeline > len(config.layers):
        return Objection("TooFewLayers", f"pipeline {pipeline} is more than the model's {len(config.layers)} layers")
    if tensor == 1:
        return None
    kinds = {
        (id(layer.attention), id(layer.mlp), id(layer.moe), formats.layer(index)): layer
        for index, layer in enumerate(config.layers)
    }
    found = (
        each
        for (*_, stored), layer in kinds.items()
        for each in _of_layer(layer, dict(stored), tensor, whole_experts=whole_experts)
    )
    return next(found, None) or _parts("the vocabulary", config.vocab_size, tensor)


def not_split(architecture: str) -> Objection:
    """Return the objection to several ranks for an architecture that only the Transformers backend runs."""
    return Objection("NotSplit", f"{architecture} runs on the Transformers backend, which does not support sharding")


def tensor_sizes(
    config: ModelConfig, limit: int, *, whole_experts: bool = False, formats: WeightFormats = ALL_NUMBERS
) -> list[int]:
    """Return the tensor-parallel sizes, up to `limit` and `_MOST`, that the model can run with."""
    return [
        size
        for size in range(1, min(limit, _MOST) + 1)
        if objection(config, size, whole_experts=whole_experts, formats=formats) is None
    ]


def largest_part(size: int, parts: int, multiple: int = 1) -> int:
    """Return the largest shard, the first, of `size` units that are split into `parts` at multiples of `multiple`. The
    next shards have the same size until the units are used up."""
    return min(-(-size // (parts * multiple)) * multiple, size)


def share_of(size: int, parts: int, multiple: int, index: int) -> int:
    """Return the size of shard `index`. If no units are left for it, it is a replica of full size."""
    each = largest_part(size, parts, multiple)
    remaining = size - index * each
    return min(each, remaining) if remaining > 0 else each


def every_part_has_some(size: int, parts: int, multiple: int = 1) -> bool:
    """Whether no shard is empty."""
    return parts == 1 or (parts - 1) * largest_part(size, parts, multiple) < size


def dealt(count: int, parts: int, index: int) -> range:
    """Return the indices, of `count` whole items, that part `index` holds. The parts are contiguous; if `parts` does
    not divide `count`, the first ones hold one item more."""
    each, remainder = divmod(count, parts)
    start = index * each + min(index, remainder)
    return range(start, start + each + (index < remainder))


def heads_problem(heads: int, kv_heads: int, tensor: int) -> Objection | None:
    """Return why the attention heads cannot be sharded, or None if they can.

    Args:
        heads: number of query heads.
        kv_heads: number of key-value heads; 0 if they are replicated on every rank.
        tensor: tensor-parallel size.
    """
    if heads % tensor:
        message = f"tensor {tensor} does not divide the model's {heads} attention heads"
        return Objection("HeadsNotDivisible", message)
    if kv_heads and kv_heads % tensor and tensor % kv_heads:
        message = f"tensor {tensor} neither divides the model's {kv_heads} key-value heads nor is a multiple of them"
        return Objection("KVHeadsNotDivisible", message)
    return None


def _of_layer(
    layer: LayerConfig, stored: Mapping[str, StoredFormat], tensor: int, *, whole_experts: bool
) -> Iterator[Objection]:
    yield from _some(_attention(layer.attention, stored.get("o"), tensor))
    moe = layer.moe
    if moe is None:
        yield from _some(_parts("the MLP's inner size", layer.mlp.size, tensor, stored.get("down")))
        return
    if whole_experts:
        if moe.num_experts < tensor:
            message = f"tensor {tensor} is more than the model's {moe.num_experts} experts: some ranks would have none"
            yield Objection("ExpertsNotDivisible", message)
    else:
        down = stored.get("experts.down")
        what = "each expert's inner size"
        yield from _some(_parts(what, moe.intermediate_size, tensor, down, reason="ExpertsNotDivisible"))
    if moe.shared_intermediate_size:
        shared = stored.get("shared.down")
        yield from _some(_parts("the shared experts' inner size", moe.shared_intermediate_size, tensor, shared))


def _attention(attention: AttentionConfig, stored: StoredFormat | None, tensor: int) -> Objection | None:
    latent = attention.latent
    problem = heads_problem(attention.num_heads, 0 if latent else attention.num_kv_heads, tensor)
    if problem is not None or stored is None:
        return problem
    what = "the attention output's rows"
    rows = attention.num_heads * (latent.v_head_dim if latent else attention.head_dim)
    if _has_own_order(stored):
        return _in_own_order(what, tensor, stored)
    if rows // tensor % stored.column_multiple == 0:
        return None
    return Objection(
        "ShardsNotDivisible",
        f"tensor {tensor} splits {what}, {rows:,}, into {tensor} parts of {rows // tensor:,}, which are not whole "
        f"blocks of {stored.column_multiple} as {stored.name} stores them",
    )


def _parts(
    what: str, size: int, tensor: int, stored: StoredFormat | None = None, reason: str = "ShardsNotDivisible"
) -> Objection | None:
    """Return why a dimension that can be split between any two blocks cannot be sharded, or None if it can."""
    if stored is not None and _has_own_order(stored):
        return _in_own_order(what, tensor, stored, reason)
    multiple = stored.column_multiple if stored else 1
    if every_part_has_some(size, tensor, multiple):
        return None
    blocks = f" in {stored.name} blocks of {multiple}" if stored is not None and multiple > 1 else ""
    return Objection(reason, f"tensor {tensor} splits {what}, {size:,}{blocks}, so some ranks would have none of it")


def _in_own_order(what: str, tensor: int, stored: StoredFormat, reason: str = "ShardsNotDivisible") -> Objection:
    message = f"tensor {tensor} cannot split {what}: the checkpoint stores them as {stored.name}, in activation order"
    return Objection(reason, f"{message} (act order)")


def _has_own_order(stored: StoredFormat) -> bool:
    """Whether the columns of a block need not be adjacent (act order), so the matrix cannot be split by columns."""
    return isinstance(stored, GroupFormat) and stored.in_order_of == "groups"


def _some(problem: Objection | None) -> Iterator[Objection]:
    if problem is not None:
        yield problem
