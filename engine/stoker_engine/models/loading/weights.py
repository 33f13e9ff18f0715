"""Strict loading: every parameter of the model is filled exactly once, and every tensor of the files is accounted for.

A missing tensor is an error; so is one that nobody asked for, unless the family's description names it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Sequence
from typing import Final, Protocol

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.architectures.weight_layout import Transpose
from stoker_engine.architectures.weight_names import Destination, WeightNames
from stoker_engine.kernels.blocks import all_finite
from stoker_engine.models.loading.apply_layout import apply_operation, split_fused
from stoker_engine.models.loading.kv_scales import is_kv_scale
from stoker_engine.models.loading.load_progress import LoadProgress
from stoker_engine.models.loading.quantized_on_load import quantized
from stoker_engine.models.loading.row_slices import read_rows
from stoker_engine.models.loading.weight_source import Part, WeightSource, check_shape, some
from stoker_engine.quant.weight_target import WeightTarget

logger = logging.getLogger(__name__)


class Loadable(Protocol):
    """A model whose tensors can be filled."""

    config: ModelConfig

    def weight_targets(self) -> dict[str, WeightTarget]:
        """What a checkpoint must fill, by the parameters' names."""
        ...


def load_weights(
    model: Loadable,
    source: WeightSource,
    weight_names: WeightNames,
    progress: LoadProgress | None = None,
    elsewhere: Container[str] = (),
) -> None:
    """Fills `model` from `source`.

    Args:
        progress: is told of the bytes that are filled.
        elsewhere: parameters that other stages of a pipeline have; tensors for these are not read.

    Raises:
        WeightsError: tensors are missing, unused, doubled or of another shape; the message names them.
    """
    targets, config = model.weight_targets(), model.config
    plan, filled = dict[str, Destination](), dict[str, str]()
    ignored, unused = list[str](), list[str]()
    stored = frozenset(name for name in source.names() if source.stored(name) is not None)
    for name in source.names():
        canonical = weight_names.canonical(name)
        destination = weight_names.destination(canonical, targets, config)
        if destination is not None:
            plan[name] = destination
            for param_name in destination.param_names:
                if param_name in filled:
                    raise WeightsError(f"weights hold {param_name} twice: as {filled[param_name]} and as {name}")
                filled[param_name] = name
        elif is_kv_scale(name) or weight_names.destination(canonical, elsewhere, config) is not None:
            continue
        elif weight_names.is_ignored(canonical, config) or _is_tied_head(canonical, weight_names, config):
            ignored.append(name)
        elif _is_order_of(name, stored):  # of a matrix that is dequantized when it is loaded
            continue
        else:
            unused.append(name)
    zeros = [name for name in unused if _is_bias_of_zeros(name, stored, source)]
    ignored += zeros
    unused = [name for name in unused if name not in zeros]
    missing = sorted(set(targets) - set(filled))
    if missing:
        raise WeightsError(f"weights lack {len(missing)} tensors the model needs: {some(missing)}")
    if unused:
        raise WeightsError(f"weights hold {len(unused)} tensors the model has no place for: {some(unused)}")
    if ignored:
        logger.info("not needed and left out: %d tensors (%s)", len(ignored), some(ignored))
    progress = progress or LoadProgress()
    progress.begin(sum(target.tensor.nbytes for target in targets.values()))
    for name, destination in plan.items():
        filled_by_it = [targets[param_name] for param_name in destination.param_names]
        if name.endswith(_COLUMNS):
            for target in filled_by_it:  # what was stored together has one order
                _read_into(source, name, target)
            continue
        _fill(source, name, destination, filled_by_it, config)
        for target in filled_by_it:
            _check_values(name, target)
            progress.add(target.tensor.nbytes)


def _read_into(source: WeightSource, name: str, target: WeightTarget) -> None:
    """Fills `target`; reads nothing where nothing of the weight is here."""
    if target.is_empty:
        check_shape(name, source.shape(name), target)
    else:
        source.read_into(name, target)


def _local_part(
    targets: list[WeightTarget], shape: torch.Size, destination: Destination
) -> tuple[list[WeightTarget], Part | None]:
    """Of a stack of experts: the targets from the first to the last of which this rank has something, and the part of
    the tensor that these lie in; None: all of it."""
    local = [index for index, target in enumerate(targets) if not target.is_empty]
    by_expert = destination.fused is not None and destination.fused.is_by_expert and not destination.operations
    if not by_expert or len(local) == len(targets) or not local:
        return targets, None
    first, stop = local[0], local[-1] + 1
    if shape[0] * first % len(targets) or shape[0] * stop % len(targets):
        return targets, None
    run = slice(shape[0] * first // len(targets), shape[0] * stop // len(targets))
    return targets[first:stop], (run, *(slice(0, size) for size in shape[1:]))


def check_finite(name: str, weights: torch.Tensor) -> None:
    """Weights are numbers: with others among them every answer would be nothing.

    Raises:
        WeightsError: nan or infinity is among them.
    """
    if weights.numel() and not all(
        bound.isfinite() for bound in torch.aminmax(weights)
    ):  # nan is both, where there is one
        dtype = str(weights.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} holds nan or infinity as {dtype}: the file is damaged, or its numbers are too large for --dtype "
            f"{dtype}; fetch the file again, or try --dtype float32"
        )


def _check_values(name: str, target: WeightTarget) -> None:
    if target.is_empty:
        return
    if target.stored is None:
        if target.tensor.is_floating_point():
            check_finite(name, target.tensor)
    elif not all_finite(target.tensor, target.stored, target.inner):
        raise WeightsError(f"{name} holds nan or infinity as {target.stored.name}: the file is damaged; fetch it again")


def _fill(
    source: WeightSource,
    name: str,
    destination: Destination,
    targets: list[WeightTarget],
    config: ModelConfig,
) -> None:
    """Fills `targets`, those of `destination`, with the tensor called `name` in the files.

    Raises:
        WeightsError: its shape does not fit.
    """

    operations, fused = destination.operations, destination.fused

    def parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        try:
            for operation in operations:
                tensor = apply_operation(operation, tensor, config)
            return [tensor] if fused is None else split_fused(fused, tensor, targets, config)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from None
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise WeightsError(f"{name} has shape {tuple(source.shape(name))}, which cannot be: {error}") from error

    in_blocks = any(target.stored for target in targets)
    transposes = [operation for operation in operations if isinstance(operation, Transpose)]
    if fused is None and len(transposes) == len(operations) and not (operations and in_blocks):
        (target,) = targets
        for transpose in reversed(transposes):
            target = target.transpose(transpose.first, transpose.second)
        _read_into(source, name, target)
    elif (in_blocks or any(target.shard for target in targets)) and destination.moves_rows:
        read_rows(source, name, parts_of, targets)
    else:
        targets, local_part = _local_part(targets, source.shape(name), destination)
        parts = parts_of(source.read(name, local_part))
        if len(parts) != len(targets):
            raise WeightsError(f"{name} holds {len(parts)} weights, the model needs {len(targets)}")
        for target, part in zip(targets, parts, strict=True):
            check_shape(name, part.shape, target)
            if target.is_empty:
                continue
            numbers = target.part_of(part)
            # Rows that the files do not have as such stay in no blocks of theirs; they are quantized here.
            assert target.stored is None or isinstance(target.stored, GroupFormat)
            target.tensor.copy_(numbers if target.stored is None else quantized(name, numbers, target.stored))


#: The order of a quantized matrix's columns.
_COLUMNS: Final = ".columns"


def _is_order_of(name: str, stored: Collection[str]) -> bool:
    """Whether it is the order of the columns of one of the `stored` matrices: of a module's weight, or of a stack."""
    matrix = name.removesuffix(_COLUMNS)
    return matrix != name and (f"{matrix}.weight" in stored or matrix in stored)


def _is_bias_of_zeros(name: str, stored: Collection[str], source: WeightSource) -> bool:
    """Whether it is what AutoGPTQ gave to each of the `stored` matrices, also of models without biases."""
    matrix = name.removesuffix(".bias")
    return matrix != name and f"{matrix}.weight" in stored and not bool(source.read(name).any())


def _is_tied_head(name: str, weight_names: WeightNames, config: ModelConfig) -> bool:
    """Whether this is a copy of the embedding."""
    return config.tie_word_embeddings and name == f"{weight_names.names.get('lm_head')}.weight"
