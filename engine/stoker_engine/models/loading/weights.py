"""Strict loading: every parameter of the model is filled exactly once, and every tensor of the files is accounted for.

A missing tensor is an error. An unexpected tensor is also an error, unless the family ignores it or it is known not to
be needed (such as KV-cache scales, a copy of the tied head, and biases of zeros).
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
from stoker_engine.models.loading.weight_files import some
from stoker_engine.models.loading.weight_source import Part, WeightSource, check_shape
from stoker_engine.quant.weight_target import WeightTarget

logger = logging.getLogger(__name__)


class Loadable(Protocol):
    """A model whose parameters can be filled from a checkpoint."""

    config: ModelConfig

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return all targets that a checkpoint must fill, by parameter name."""
        ...


def load_weights(
    model: Loadable,
    source: WeightSource,
    weight_names: WeightNames,
    progress: LoadProgress | None = None,
    elsewhere: Container[str] = (),
) -> None:
    """Fill the parameters of `model` from `source`.

    Args:
        progress: counts the loaded bytes.
        elsewhere: parameter names of the whole model; tensors of parameters that `model` lacks are not read.

    Raises:
        WeightsError: tensors are missing, unused, duplicated, not finite, or have the wrong shape; the message names
            them.
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
                    raise WeightsError(f"the weights contain {param_name} twice: as {filled[param_name]} and as {name}")
                filled[param_name] = name
        elif is_kv_scale(name) or weight_names.destination(canonical, elsewhere, config) is not None:
            continue
        elif weight_names.is_ignored(canonical, config) or _is_tied_head(canonical, weight_names, config):
            ignored.append(name)
        elif _is_order_of(name, stored):  # column order of a matrix that is dequantized while loading
            continue
        else:
            unused.append(name)
    zeros = [name for name in unused if _is_bias_of_zeros(name, stored, source)]
    ignored += zeros
    unused = [name for name in unused if name not in zeros]
    missing = sorted(set(targets) - set(filled))
    if missing:
        raise WeightsError(f"the weights lack {len(missing)} tensors that the model needs: {some(missing)}")
    if unused:
        raise WeightsError(f"the weights contain {len(unused)} tensors that the model does not use: {some(unused)}")
    if ignored:
        logger.info("ignored %d tensors that are not needed (%s)", len(ignored), some(ignored))
    progress = progress or LoadProgress()
    progress.begin(sum(target.tensor.nbytes for target in targets.values()))
    for name, destination in plan.items():
        filled_by_it = [targets[param_name] for param_name in destination.param_names]
        if name.endswith(_COLUMNS):
            for target in filled_by_it:  # matrices stored in one tensor have the same column order
                _read_into(source, name, target)
            continue
        _fill(source, name, destination, filled_by_it, config)
        for target in filled_by_it:
            _check_values(name, target)
            progress.add(target.tensor.nbytes)


def _read_into(source: WeightSource, name: str, target: WeightTarget) -> None:
    """Fill `target`. If this rank holds no part of the weight, only check the shape."""
    if target.is_empty:
        check_shape(name, source.shape(name), target)
    else:
        source.read_into(name, target)


def _local_part(
    targets: list[WeightTarget], shape: torch.Size, destination: Destination
) -> tuple[list[WeightTarget], Part | None]:
    """Restrict a stack of experts to this rank: return the targets from the first to the last one that the rank holds,
    and the part of the tensor to read; None: the whole tensor."""
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
    """Check that all weights are finite: a single NaN may make every output NaN.

    Raises:
        WeightsError: the weights contain NaN or infinity.
    """
    if weights.numel() and not all(
        bound.isfinite() for bound in torch.aminmax(weights)
    ):  # both bounds are NaN if any element is
        dtype = str(weights.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} holds nan or infinity as {dtype}: the file is damaged, or its values are too large for --dtype "
            f"{dtype}; download the file again, or use --dtype float32"
        )


def _check_values(name: str, target: WeightTarget) -> None:
    if target.is_empty:
        return
    if target.stored is None:
        if target.tensor.is_floating_point():
            check_finite(name, target.tensor)
    elif not all_finite(target.tensor, target.stored, target.inner):
        raise WeightsError(
            f"{name} holds nan or infinity as {target.stored.name}: the file is damaged; download it again"
        )


def _fill(
    source: WeightSource,
    name: str,
    destination: Destination,
    targets: list[WeightTarget],
    config: ModelConfig,
) -> None:
    """Fill `targets`, the parameters of `destination`, with the tensor `name` of the files.

    Raises:
        WeightsError: the tensor has the wrong shape, or holds another number of parameters.
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
            raise WeightsError(
                f"{name} has shape {tuple(source.shape(name))}, which does not fit the model: {error}"
            ) from error

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
            raise WeightsError(f"{name} contains {len(parts)} weights, but the model needs {len(targets)}")
        for target, part in zip(targets, parts, strict=True):
            check_shape(name, part.shape, target)
            if target.is_empty:
                continue
            numbers = target.part_of(part)
            # The operations may change rows, so blocks of the file cannot be used: quantize the values.
            assert target.stored is None or isinstance(target.stored, GroupFormat)
            if target.stored is not None:
                numbers = quantized(name, numbers, target.stored, target.tensor.device)
            target.tensor.copy_(numbers)


#: Suffix of the tensor with a quantized matrix's column order.
_COLUMNS: Final = ".columns"


def _is_order_of(name: str, stored: Collection[str]) -> bool:
    """Whether the tensor is the column order of one of the `stored` matrices or stacks of matrices."""
    matrix = name.removesuffix(_COLUMNS)
    return matrix != name and (f"{matrix}.weight" in stored or matrix in stored)


def _is_bias_of_zeros(name: str, stored: Collection[str], source: WeightSource) -> bool:
    """Whether the tensor is an all-zero bias, which AutoGPTQ adds to quantized matrices of models without biases."""
    matrix = name.removesuffix(".bias")
    return matrix != name and f"{matrix}.weight" in stored and not bool(source.read(name).any())


def _is_tied_head(name: str, weight_names: WeightNames, config: ModelConfig) -> bool:
    """Whether the tensor is a tied head, by its name: a copy of the embedding."""
    return config.tie_word_embeddings and name == f"{weight_names.names.get('lm_head')}.weight"
