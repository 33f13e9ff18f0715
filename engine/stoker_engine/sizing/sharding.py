"""Tensor- and pipeline-parallel validation: whether ranks can share a model.

These are the only rules. The planner refuses by them (`stoker_operator.plan.options`), and the engine before it starts
any rank (`exec.check_sharding`). Rules of other runtimes are in `stoker_operator.plan.foreign_sharding`.

    heads                     equally many on each rank; a key and value head may also be on several
    inner sizes, vocabulary   any parts, the first of which are the largest; each rank has some
    whole experts             dealt evenly: some ranks have one more than others; each has one
    rows in blocks            are cut between blocks, and not at all where columns have an order of their own
    layers                    each stage has some

Layers themselves cut by `layers.build`, which holds to the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GroupFormat, StoredFormat
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

#: Devices that a message names at most.
_MOST: Final = 64


class Objection(NamedTuple):
    """Why ranks cannot share a model so.

    Attributes:
        reason: one CamelCase word.
        message: a sentence, without the remedy.
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
    """What is wrong with a model on `tensor` × `pipeline` ranks; None: they can share it.

    Args:
        config: the model.
        tensor: ranks that share each layer.
        pipeline: stages that the layers are dealt among.
        whole_experts: whether ranks that share a layer have whole experts of it, instead of a part of each.
        formats: how its weights are stored.
    """
    if config.num_weights is not None and (tensor * pipeline > 1 or whole_experts):
        return not_split(config.architecture)
    if whole_experts and not any(layer.moe for layer in config.layers):
        return Objection("NotMixtureOfExperts", "the model is no mixture of experts")
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
    """What is wrong with several ranks for an architecture that is no family of ours, whatever its sizes."""
    return Objection("NotSplit", f"{architecture} runs by transformers' own modules, which are not split")


def tensor_sizes(
    config: ModelConfig, limit: int, *, whole_experts: bool = False, formats: WeightFormats = ALL_NUMBERS
) -> list[int]:
    """The numbers of ranks that can share each layer, up to `limit`."""
    return [
        size
        for size in range(1, min(limit, _MOST) + 1)
        if objection(config, size, whole_experts=whole_experts, formats=formats) is None
    ]


def largest_part(size: int, parts: int, multiple: int = 1) -> int:
    """What the first of `parts` has of what is cut at multiples: the largest there is. The others have as much, as long
    as there is any."""
    return min(-(-size // (parts * multiple)) * multiple, size)


def share_of(size: int, parts: int, multiple: int, index: int) -> int:
    """What the part with number `index` has; where parts share what cannot be cut further, each has as much."""
    each = largest_part(size, parts, multiple)
    remaining = size - index * each
    return min(each, remaining) if remaining > 0 else each


def every_part_has_some(size: int, parts: int, multiple: int = 1) -> bool:
    """Whether something is left for the last of `parts`."""
    return parts == 1 or (parts - 1) * largest_part(size, parts, multiple) < size


def dealt(count: int, parts: int, index: int) -> range:
    """What the part with number `index` has of things that are dealt whole, in order; the first parts have one more
    than the others where they do not come out even."""
    each, remainder = divmod(count, parts)
    start = index * each + min(index, remainder)
    return range(start, start + each + (index < remainder))


def heads_problem(heads: int, kv_heads: int, tensor: int) -> Objection | None:
    """What is wrong with sharing so many attention heads.

    Args:
        heads: query heads.
        kv_heads: heads of keys and values; 0: every rank has all of them.
        tensor: ranks.
    """
    if heads % tensor:
        message = f"tensor {tensor} does not divide the model's {heads} attention heads"
        return Objection("HeadsNotDivisible", message)
    if kv_heads and kv_heads % tensor and tensor % kv_heads:
        message = f"tensor {tensor} neither divides the model's {kv_heads} key-value heads nor is their multiple"
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
            message = f"tensor {tensor} deals the {moe.num_experts} experts, so that nothing is left for some ranks"
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
    """What is wrong with sharing what can be cut into any parts, between blocks."""
    if stored is not None and _has_own_order(stored):
        return _in_own_order(what, tensor, stored, reason)
    multiple = stored.column_multiple if stored else 1
    if every_part_has_some(size, tensor, multiple):
        return None
    blocks = f" in blocks of {multiple} as {stored.name} stores them" if stored is not None and multiple > 1 else ""
    return Objection(reason, f"tensor {tensor} splits {what}, {size:,}{blocks}, so that nothing is left for some ranks")


def _in_own_order(what: str, tensor: int, stored: StoredFormat, reason: str = "ShardsNotDivisible") -> Objection:
    message = f"tensor {tensor} cannot split {what}: as {stored.name} stores them, they have an order of their own"
    return Objection(reason, f"{message} (act order)")


def _has_own_order(stored: StoredFormat) -> bool:
    """Whether numbers of a block need not follow each other, so that no cut is between blocks."""
    return isinstance(stored, GroupFormat) and stored.in_order_of == "groups"


def _some(problem: Objection | None) -> Iterator[Objection]:
    if problem is not None:
        yield problem
