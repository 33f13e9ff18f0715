"""Strict loading: every slot of the model is filled exactly once, and every tensor of the files is accounted for.

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
from stoker_engine.kernels.blocks import all_finite
from stoker_engine.models.families.weight_names import (
    Make,
    Place,
    Split,
    TakesTurns,
    Transposed,
    WeightNames,
    moves_rows,
)
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

    def slots(self) -> dict[str, WeightTarget]:
        """Every place that a checkpoint must fill, by slot name."""
        ...


def load_weights(
    model: Loadable,
    source: WeightSource,
    spelling: WeightNames,
    progress: LoadProgress | None = None,
    elsewhere: Container[str] = (),
) -> None:
    """Fills `model` from `source`.

    Args:
        progress: is told of the bytes that are filled.
        elsewhere: slots that other stages of a pipeline fill; tensors for these are not read.

    Raises:
        WeightsError: tensors are missing, unused, doubled or of another shape; the message names them.
    """
    slots, config = model.slots(), model.config
    plan, filled = dict[str, Place](), dict[str, str]()
    ignored, unused = list[str](), list[str]()
    stored = frozenset(name for name in source.names() if source.stored(name) is not None)
    for name in source.names():
        canonical = spelling.canonical(name)
        place = spelling.place(canonical, slots, config)
        if place is not None:
            plan[name] = place
            for slot in place.slots:
                if slot in filled:
                    raise WeightsError(f"weights hold {slot} twice: as {filled[slot]} and as {name}")
                filled[slot] = name
        elif is_kv_scale(name) or spelling.place(canonical, elsewhere, config) is not None:
            continue
        elif spelling.is_ignored(canonical, config) or _is_tied_head(canonical, spelling, config):
            ignored.append(name)
        elif _is_order_of(name, stored):  # of a matrix that is dequantized when it is loaded
            continue
        else:
            unused.append(name)
    zeros = [name for name in unused if _is_bias_of_zeros(name, stored, source)]
    ignored += zeros
    unused = [name for name in unused if name not in zeros]
    missing = sorted(set(slots) - set(filled))
    if missing:
        raise WeightsError(f"weights lack {len(missing)} tensors the model needs: {some(missing)}")
    if unused:
        raise WeightsError(f"weights hold {len(unused)} tensors the model has no place for: {some(unused)}")
    if ignored:
        logger.info("not needed and left out: %d tensors (%s)", len(ignored), some(ignored))
    progress = progress or LoadProgress()
    progress.begin(sum(slot.tensor.nbytes for slot in slots.values()))
    for name, place in plan.items():
        targets = [slots[slot] for slot in place.slots]
        if name.endswith(_COLUMNS):
            for target in targets:  # what was stored together has one order
                _read_into(source, name, target)
            continue
        _fill(source, name, spelling.makes(spelling.canonical(name)), place.split, targets, config)
        for target in targets:
            _check_slot(name, target)
            progress.add(target.tensor.nbytes)


def _read_into(source: WeightSource, name: str, slot: WeightTarget) -> None:
    """Fills `slot`; reads nothing where nothing of the weight is here."""
    if slot.is_empty:
        check_shape(name, source.shape(name), slot)
    else:
        source.read_into(name, slot)


def _here(slots: list[WeightTarget], shape: torch.Size, split: Split | None) -> tuple[list[WeightTarget], Part | None]:
    """Of a tensor that `split` takes apart: the slots of which something is here, and the part that they lie in."""
    here = [index for index, slot in enumerate(slots) if not slot.is_empty]
    if not isinstance(split, TakesTurns) or len(here) == len(slots) or not here:
        return slots, None
    first, stop = here[0], here[-1] + 1
    if shape[0] * first % len(slots) or shape[0] * stop % len(slots):
        return slots, None
    run = slice(shape[0] * first // len(slots), shape[0] * stop // len(slots))
    return slots[first:stop], (run, *(slice(0, size) for size in shape[1:]))


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


def _check_slot(name: str, slot: WeightTarget) -> None:
    if slot.is_empty:
        return
    if slot.stored is None:
        if slot.tensor.is_floating_point():
            check_finite(name, slot.tensor)
    elif not all_finite(slot.tensor, slot.stored, slot.inner):
        raise WeightsError(f"{name} holds nan or infinity as {slot.stored.name}: the file is damaged; fetch it again")


def _fill(
    source: WeightSource,
    name: str,
    makes: list[Make],
    split: Split | None,
    slots: list[WeightTarget],
    config: ModelConfig,
) -> None:
    """Fills `slots` with the tensor called `name` in the files, once `makes` and then `split` have been applied to it.

    Raises:
        WeightsError: its shape does not fit.
    """

    def parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        try:
            for make in makes:
                tensor = make(tensor, config)
            return [tensor] if split is None else split(tensor, slots, config)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from None
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise WeightsError(f"{name} has shape {tuple(source.shape(name))}, which cannot be: {error}") from error

    in_blocks = any(slot.stored for slot in slots)
    if split is None and all(isinstance(make, Transposed) for make in makes) and not (makes and in_blocks):
        (slot,) = slots
        for make in reversed(makes):
            assert isinstance(make, Transposed)
            slot = slot.transpose(make.first, make.second)
        _read_into(source, name, slot)
    elif (in_blocks or any(slot.shard for slot in slots)) and moves_rows(makes, split):
        read_rows(source, name, parts_of, slots)
    else:
        slots, part_here = _here(slots, source.shape(name), split if not makes else None)
        parts = parts_of(source.read(name, part_here))
        if len(parts) != len(slots):
            raise WeightsError(f"{name} holds {len(parts)} weights, the model needs {len(slots)}")
        for slot, part in zip(slots, parts, strict=True):
            check_shape(name, part.shape, slot)
            if slot.is_empty:
                continue
            numbers = slot.part_of(part)
            # Rows that the files do not have as such stay in no blocks of theirs; they are quantized here.
            assert slot.stored is None or isinstance(slot.stored, GroupFormat)
            slot.tensor.copy_(numbers if slot.stored is None else quantized(name, numbers, slot.stored))


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


def _is_tied_head(name: str, spelling: WeightNames, config: ModelConfig) -> bool:
    """Whether this is a copy of the embedding."""
    return config.tie_word_embeddings and name == f"{spelling.names.get('lm_head')}.weight"
